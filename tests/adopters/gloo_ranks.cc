// SPDX-License-Identifier: Apache-2.0 OR MIT
// Three ranks of Gloo with the transport ibverbs. Compares the results of collectives of many sizes.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allgather_ring.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

namespace {

constexpr int RANKS = 3;
constexpr int LENGTHS[] = {1, 1000, 1 << 18, 1 << 21};
constexpr int ROUNDS = 5;

using Context = std::shared_ptr<gloo::Context>;
using Numbers = std::vector<int64_t>;

int64_t value(int rank, size_t at) { return int64_t(at) * 7 + rank * 1000003; }

Numbers own(int rank, size_t length) {
  Numbers numbers(length);
  for (size_t at = 0; at < length; at++) numbers[at] = value(rank, at);
  return numbers;
}

void equal(const char* what, const Numbers& numbers, int64_t (*wanted)(size_t at, size_t length), size_t length) {
  for (size_t at = 0; at < numbers.size(); at++) {
    if (numbers[at] != wanted(at, length)) {
      fprintf(stderr, "%s of %zu: element %zu is %lld instead of %lld\n", what, length, at, (long long)numbers[at],
              (long long)wanted(at, length));
      _exit(1);
    }
  }
}

int64_t sum(size_t at, size_t) {
  int64_t all = 0;
  for (int rank = 0; rank < RANKS; rank++) all += value(rank, at);
  return all;
}

int64_t of_the_last(size_t at, size_t) { return value(RANKS - 1, at); }

int64_t of_each(size_t at, size_t length) { return value(int(at / length), at % length); }

// Never destroys the algorithm: its last message may still be under way when it returns, and Gloo would abort. Other programs keep
// their algorithms too.
template <typename Algorithm, typename... Arguments>
Algorithm& kept(const Context& context, Arguments... arguments) {
  return *new Algorithm(context, arguments...);
}

template <typename Algorithm>
void allreduce(const char* what, const Context& context, int length) {
  Numbers& numbers = *new Numbers(length);
  Algorithm& algorithm = kept<Algorithm>(context, std::vector<int64_t*>{numbers.data()}, length);
  for (int round = 0; round < ROUNDS; round++) {
    Numbers before = own(context->rank, length);
    std::copy(before.begin(), before.end(), numbers.begin());
    algorithm.run();
    equal(what, numbers, sum, length);
  }
}

void run_rank(int rank, const std::string& store_path) {
  gloo::transport::ibverbs::attr attr = {"", 1, 0};
  auto device = gloo::transport::ibverbs::CreateDevice(attr);
  gloo::rendezvous::FileStore store(store_path);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, RANKS);
  context->connectFullMesh(store, device);

  for (int length : LENGTHS) {
    allreduce<gloo::AllreduceRing<int64_t>>("allreduce_ring", context, length);
    allreduce<gloo::AllreduceRingChunked<int64_t>>("allreduce_ring_chunked", context, length);
    allreduce<gloo::AllreduceHalvingDoubling<int64_t>>("allreduce_halving_doubling", context, length);

    Numbers& mine = *new Numbers(own(rank, length));
    Numbers& all = *new Numbers(size_t(length) * RANKS);
    std::vector<const int64_t*> from{mine.data()};
    kept<gloo::AllgatherRing<int64_t>>(context, from, all.data(), length).run();
    equal("allgather_ring", all, of_each, length);

    std::vector<int64_t*> both{mine.data()};
    kept<gloo::BroadcastOneToAll<int64_t>>(context, both, length, RANKS - 1).run();
    equal("broadcast", mine, of_the_last, length);
    kept<gloo::BarrierAllToAll>(context).run();
  }
  // The context is never destroyed either, for the same reason as the algorithms.
  new Context(context);
}

}  // namespace

int main() {
  char store[] = "/tmp/gloo-ranks-XXXXXX";
  int done[2], end[2];
  if (!mkdtemp(store) || pipe(done) || pipe(end)) return perror("gloo_ranks"), 1;
  for (int rank = 0; rank < RANKS; rank++) {
    if (fork() == 0) {
      close(end[1]);
      close(done[0]);
      try {
        run_rank(rank, store);
      } catch (const std::exception& e) {
        fprintf(stderr, "rank %d: %s\n", rank, e.what());
        _exit(1);
      }
      // A rank exits when all ranks are done, because the others may still send to it.
      char byte = 0;
      _exit(write(done[1], &byte, 1) != 1 || read(end[0], &byte, 1) != 0);
    }
  }
  close(done[1]);
  char byte;
  for (int rank = 0; rank < RANKS && read(done[0], &byte, 1) == 1; rank++) {}
  close(end[1]);
  int failed = 0, status;
  while (wait(&status) > 0) failed += status != 0;
  (void)!system(("rm -rf " + std::string(store)).c_str());
  if (failed) return fprintf(stderr, "%d ranks failed\n", failed), 1;
  printf("equal %zu\n", sizeof LENGTHS / sizeof *LENGTHS);
}
