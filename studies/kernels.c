/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Two kernels of the NAS parallel benchmarks, implemented from their specification (NAS Technical Report RNR-94-007).
 * IS sorts integers with an all-to-all exchange of keys. CG finds an eigenvalue with conjugate gradients. A random
 * number generator defines the input of both, and the results must equal published values, so that a wrong byte in a
 * message is detected.
 *
 * Rows and keys are distributed in blocks, and CG gathers its vector before each product. The reference programs
 * distribute the matrix in two dimensions. Times are therefore comparable between transports, but not with published
 * ones.
 *
 *   kernels S|W|A|B [is|cg]
 *   kernels -                each line of the standard input has these arguments
 */
#include <math.h>
#include <string.h>

#include "commands.h"
#include "npb.h"

/* ---------------------------------------------------------------- IS */

enum { TESTED = 5, SORTS = 10, BUCKETS = 1 << 10 };

struct is {
	char class;
	int log_keys, log_max;
	/* Keys with known positions in the sorted order: their indexes, and the base of their positions. */
	long index[TESTED], place[TESTED];
	/*
	 * The positions depend on the number of the repetition. They are place + (number - `from`) for the first `rising`
	 * keys, and place - (number - `other`) for the others.
	 */
	int rising, from, other;
};

static const struct is sorts[] = {
	{ 'S', 16, 11, { 48427, 17148, 23627, 62548, 4431 }, { 0, 18, 346, 64917, 65463 }, 3, 0, 0 },
	{ 'W', 20, 16, { 357773, 934767, 875723, 898999, 404505 }, { 1249, 11698, 1039987, 1043896, 1048018 }, 2, 2, 0 },
	{ 'A', 23, 19, { 2112377, 662041, 5336171, 3642833, 4250760 }, { 104, 17523, 123928, 8288932, 8388264 }, 3, 1, 1 },
	{ 'B', 25, 21, { 812306, 5102857, 26860214, 41869, 18232239 }, { 10244, 59149, 99, 33422937, 33135281 }, 3, 0, 0 },
};

static void prefix(const int *counts, int *starts)
{
	starts[0] = 0;
	for (int r = 1; r < ranks; r++)
		starts[r] = starts[r - 1] + counts[r - 1];
}

/*
 * Moves each key to the process that has its range. `sorted` gets the keys of this process, in any order; `before` the
 * number of keys of lower processes. Returns the number of keys of this process.
 */
static size_t sort_once(const int *keys, size_t mine, int shift, int **sorted, long *before)
{
	static long here[BUCKETS], all[BUCKETS];
	static int owner[BUCKETS], at[BUCKETS];
	int *out_counts = room((size_t)ranks, sizeof(int)), *in_counts = room((size_t)ranks, sizeof(int));
	int *out_at = room((size_t)ranks, sizeof(int)), *in_at = room((size_t)ranks, sizeof(int));
	int *out = room(mine, sizeof(int));
	long sum = 0, total = 0;
	size_t got;

	memset(here, 0, sizeof here);
	for (size_t i = 0; i < mine; i++)
		here[keys[i] >> shift]++;
	MPI_Allreduce(here, all, BUCKETS, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	for (int b = 0; b < BUCKETS; b++)
		total += all[b];
	*before = 0;
	for (int b = 0; b < BUCKETS; b++) {
		owner[b] = (int)(sum * ranks / (total + 1));
		*before += owner[b] < rank ? all[b] : 0;
		sum += all[b];
		out_counts[owner[b]] += (int)here[b];
	}
	prefix(out_counts, out_at);
	for (int b = 0, used = 0; b < BUCKETS; b++) {
		at[b] = used;
		used += (int)here[b];
	}
	for (size_t i = 0; i < mine; i++)
		out[at[keys[i] >> shift]++] = keys[i];
	MPI_Alltoall(out_counts, 1, MPI_INT, in_counts, 1, MPI_INT, MPI_COMM_WORLD);
	prefix(in_counts, in_at);
	got = (size_t)in_at[ranks - 1] + (size_t)in_counts[ranks - 1];
	free(*sorted);
	*sorted = room(got, sizeof(int));
	MPI_Alltoallv(out, out_counts, out_at, MPI_INT, *sorted, in_counts, in_at, MPI_INT, MPI_COMM_WORLD);
	free(out_counts), free(in_counts), free(out_at), free(in_at), free(out);
	return got;
}

static int compare(const void *a, const void *b)
{
	return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b);
}

static double run_is(const struct is *c)
{
	size_t n = (size_t)1 << c->log_keys, first = begin_of(n, rank, ranks), mine = begin_of(n, rank + 1, ranks) - first, got = 0;
	int max = 1 << c->log_max, shift = c->log_max - 10, *keys = room(mine, sizeof(int)), *sorted = NULL;
	uint64_t state = state_after(4 * first);
	double began, took;
	long before = 0;

	for (size_t i = 0; i < mine; i++) {
		double sum = 0;

		for (int k = 0; k < 4; k++)
			sum += draw(&state);
		keys[i] = (int)(max / 4 * sum);
	}
	/* One sort is not timed, as in the reference program: transports connect and register memory when they are first used. */
	sort_once(keys, mine, shift, &sorted, &before);
	MPI_Barrier(MPI_COMM_WORLD);
	began = MPI_Wtime();
	for (int turn = 1; turn <= SORTS; turn++) {
		long value[TESTED] = { 0 }, lower[TESTED] = { 0 }, values[TESTED], places[TESTED];

		if (rank == 0) {
			keys[turn] = turn;
			keys[turn + SORTS] = max - turn;
		}
		for (int t = 0; t < TESTED; t++)
			if ((size_t)c->index[t] >= first && (size_t)c->index[t] < first + mine)
				value[t] = keys[(size_t)c->index[t] - first];
		got = sort_once(keys, mine, shift, &sorted, &before);
		MPI_Allreduce(value, values, TESTED, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
		for (size_t i = 0; i < got; i++)
			for (int t = 0; t < TESTED; t++)
				lower[t] += sorted[i] < values[t];
		MPI_Allreduce(lower, places, TESTED, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
		for (int t = 0; t < TESTED; t++) {
			long wanted = c->place[t] + (t < c->rising ? turn - c->from : c->other - turn);

			ensure(places[t] == wanted, "IS: the position of a key", (double)places[t], (double)wanted);
		}
	}
	took = MPI_Wtime() - began;
	/* Checks the order within each rank and between neighbouring ranks. */
	qsort(sorted, got, sizeof(int), compare);
	long here = (long)got, all = 0, lower_ranks = 0;
	int top = got ? sorted[got - 1] : -1, highest = -1;

	MPI_Allreduce(&here, &all, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	ensure(all == (long)n, "IS: keys", (double)all, (double)n);
	MPI_Exscan(&here, &lower_ranks, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
	MPI_Exscan(&top, &highest, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
	if (rank > 0) {
		ensure(lower_ranks == before, "IS: lower keys", (double)lower_ranks, (double)before);
		ensure(!got || highest < sorted[0], "IS: the order between ranks", highest, got ? sorted[0] : 0);
	}
	free(keys), free(sorted);
	return took;
}

/* ---------------------------------------------------------------- CG */

struct cg {
	char class;
	int order, nonzeros, turns;
	double shift, zeta;
};

static const struct cg systems[] = {
	{ 'S', 1400, 7, 15, 10, 8.5971775078648 },
	{ 'W', 7000, 8, 15, 12, 10.362595087124 },
	{ 'A', 14000, 11, 15, 20, 17.130235054029 },
	{ 'B', 75000, 13, 75, 60, 22.712745482631 },
};

struct entry {
	int row, column;
	double value;
};

/* The rows of this rank. Row i has the elements `entries[start[i]]` to `entries[start[i + 1] - 1]`. */
struct matrix {
	struct entry *entries;
	size_t *start, first, rows;
	int *counts, *offsets, order;
};

static int by_place(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	return x->row != y->row ? (x->row > y->row) - (x->row < y->row) : (x->column > y->column) - (x->column < y->column);
}

/* Makes the rows of this rank. The matrix is a sum of n outer products of sparse random vectors with weights from 1 down to 0.1. Its
 * diagonal is raised by 0.1 - shift. */
static void make_matrix(struct matrix *m, const struct cg *c)
{
	const double condition = 0.1;
	size_t most = 0, used = 0;
	double weight = 1, ratio = pow(condition, 1.0 / c->order), values[32];
	uint64_t state = SEED;
	int columns[32], power = 1;

	m->order = c->order;
	m->first = begin_of((size_t)c->order, rank, ranks);
	m->rows = begin_of((size_t)c->order, rank + 1, ranks) - m->first;
	m->start = room(m->rows + 1, sizeof *m->start);
	m->counts = room((size_t)ranks, sizeof(int));
	m->offsets = room((size_t)ranks, sizeof(int));
	for (int r = 0; r < ranks; r++) {
		m->offsets[r] = (int)begin_of((size_t)c->order, r, ranks);
		m->counts[r] = (int)begin_of((size_t)c->order, r + 1, ranks) - m->offsets[r];
	}
	while (power < c->order)
		power *= 2;
	draw(&state);
	for (int i = 0; i < c->order; i++, weight *= ratio) {
		int count = 0, known;

		while (count < c->nonzeros) {
			double value = draw(&state);
			int column = (int)(power * draw(&state));

			for (known = 0; known < count && columns[known] != column; known++)
				;
			if (column < c->order && known == count) {
				columns[count] = column;
				values[count++] = value;
			}
		}
		for (known = 0; known < count && columns[known] != i; known++)
			;
		columns[known] = i;
		values[known] = 0.5;
		count += known == count;
		for (int j = 0; j < count; j++) {
			size_t row = (size_t)columns[j];

			if (row < m->first || row >= m->first + m->rows)
				continue;
			for (int k = 0; k < count; k++) {
				double value = weight * values[j] * values[k];

				if (columns[j] == i && columns[k] == i)
					value += condition - c->shift;
				if (used == most) {
					most = most ? 2 * most : 1 << 16;
					m->entries = realloc(m->entries, most * sizeof *m->entries);
					ensure(m->entries != NULL, "no memory", 0, 0);
				}
				m->entries[used++] = (struct entry){ columns[j], columns[k], value };
			}
		}
	}
	qsort(m->entries, used, sizeof *m->entries, by_place);
	size_t kept = 0;
	for (size_t i = 0; i < used; i++) {
		if (kept && by_place(&m->entries[kept - 1], &m->entries[i]) == 0)
			m->entries[kept - 1].value += m->entries[i].value;
		else
			m->entries[kept++] = m->entries[i];
	}
	for (size_t i = 0; i < kept; i++)
		m->start[(size_t)m->entries[i].row - m->first + 1] = i + 1;
	for (size_t i = 1; i <= m->rows; i++)
		if (m->start[i] < m->start[i - 1])
			m->start[i] = m->start[i - 1];
}

static double dot(const double *a, const double *b, size_t n)
{
	double here = 0, all = 0;

	for (size_t i = 0; i < n; i++)
		here += a[i] * b[i];
	MPI_Allreduce(&here, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	return all;
}

/* Approximates z with A z = x in 25 steps. `whole` has room for a vector of all ranks. */
static void solve(const struct matrix *m, const double *x, double *z, double *r, double *p, double *q, double *whole)
{
	size_t n = m->rows;
	double rho;

	memset(z, 0, n * sizeof *z);
	memcpy(r, x, n * sizeof *r);
	memcpy(p, x, n * sizeof *p);
	rho = dot(r, r, n);
	for (int step = 0; step < 25; step++) {
		double before = rho, alpha;

		MPI_Allgatherv(p, m->counts[rank], MPI_DOUBLE, whole, m->counts, m->offsets, MPI_DOUBLE, MPI_COMM_WORLD);
		for (size_t i = 0; i < n; i++) {
			q[i] = 0;
			for (size_t e = m->start[i]; e < m->start[i + 1]; e++)
				q[i] += m->entries[e].value * whole[m->entries[e].column];
		}
		alpha = rho / dot(p, q, n);
		for (size_t i = 0; i < n; i++) {
			z[i] += alpha * p[i];
			r[i] -= alpha * q[i];
		}
		rho = dot(r, r, n);
		for (size_t i = 0; i < n; i++)
			p[i] = r[i] + rho / before * p[i];
	}
}

static double run_cg(const struct cg *c)
{
	struct matrix m = { 0 };
	double *v[5], *whole, zeta = 0, began, took;

	make_matrix(&m, c);
	for (int i = 0; i < 5; i++)
		v[i] = room(m.rows, sizeof(double));
	whole = room((size_t)c->order, sizeof(double));
	for (size_t i = 0; i < m.rows; i++)
		v[0][i] = 1;
	/* One solution is not timed, as the first sort of IS is not. It does not change v[0]. */
	solve(&m, v[0], v[1], v[2], v[3], v[4], whole);
	MPI_Barrier(MPI_COMM_WORLD);
	began = MPI_Wtime();
	for (int turn = 0; turn < c->turns; turn++) {
		double scale;

		solve(&m, v[0], v[1], v[2], v[3], v[4], whole);
		zeta = c->shift + 1 / dot(v[0], v[1], m.rows);
		scale = 1 / sqrt(dot(v[1], v[1], m.rows));
		for (size_t i = 0; i < m.rows; i++)
			v[0][i] = scale * v[1][i];
	}
	took = MPI_Wtime() - began;
	ensure(fabs(zeta - c->zeta) <= 1e-10 * c->zeta, "CG: zeta", zeta, c->zeta);
	for (int i = 0; i < 5; i++)
		free(v[i]);
	free(whole), free(m.entries), free(m.start), free(m.counts), free(m.offsets);
	return took;
}

static void run(int argc, char **argv)
{
	const char *which = argc > 2 ? argv[2] : "";
	int ran = 0;

	for (size_t i = 0; argc > 1 && i < sizeof sorts / sizeof *sorts; i++) {
		if (sorts[i].class != argv[1][0])
			continue;
		if (strcmp(which, "cg")) {
			report("is", sorts[i].class, run_is(&sorts[i]));
			ran++;
		}
		if (strcmp(which, "is")) {
			report("cg", systems[i].class, run_cg(&systems[i]));
			ran++;
		}
	}
	ensure(ran > 0, "kernels S|W|A|B [is|cg]", argc, 2);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	char *words[MOST_WORDS] = { argv[0] };
	int count;

	start(&argc, &argv);
	if (argc == 2 && !strcmp(argv[1], "-"))
		while ((count = next_command(words)))
			run(count, words);
	else
		run(argc, argv);
	MPI_Finalize();
	return 0;
}
