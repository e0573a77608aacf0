/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The kernel MG of the NAS parallel benchmarks, implemented from its specification (NAS Technical Report RNR-94-007). It
 * approximates the solution of Poisson's equation on a periodic cube by cycles over grids of 2, 4, 8, ... points in each
 * direction. Messages are planes of the grids that are divided. In class A on 2 ranks, the largest has 520 KiB and the
 * smallest 288 bytes. The norm of the residual must equal the published value.
 *
 * The cube is divided in z, then in y, then in x. The number of ranks must be a power of two. A coarse grid with fewer than
 * two planes for a rank is not divided: the ranks add up their parts, and each computes all of it.
 *
 *   mg S|W|A|B
 */
#include <math.h>
#include <string.h>

#include "npb.h"

struct class {
	char class;
	int log_size, turns;
	double norm;
};

static const struct class classes[] = {
	{ 'S', 5, 4, 0.5307707005734e-04 },
	{ 'W', 7, 4, 0.6467329375339e-05 },
	{ 'A', 8, 4, 0.2433365309069e-05 },
	{ 'B', 8, 20, 0.1800564401355e-05 },
};

/*
 * An operator adds up 27 points with a weight for the point itself, one for the 6 points that differ from it in one
 * coordinate, one for the 12 that differ in two, and one for the 8 that differ in three.
 */
typedef double weights[4];

/* The Laplacian with its sign reversed, since only residuals need it. */
static const weights MINUS_A = { 8.0 / 3, 0, -1.0 / 6, -1.0 / 12 };
static const weights RESTRICTION = { 1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16 };
static const weights SMOOTHER = { -3.0 / 8, 1.0 / 32, -1.0 / 64, 0 }, SMOOTHER_B = { -3.0 / 17, 1.0 / 33, -1.0 / 61, 0 };

enum { MOST_LEVELS = 8, MOST = 1 << MOST_LEVELS, CHARGES = 10 };

/* A grid of 2^level points in each direction, or this rank's part of it. Each side has one more plane, of a neighbour's points. */
struct grid {
	int size[3], whole;
	/* The distances in memory to the next point in x, in y and in z, and the number of points. */
	size_t step[4];
	double *u, *r;
	/* The types of the planes: the points with equal x, with equal y, and with equal z. */
	MPI_Datatype plane[3];
};

static struct grid grids[MOST_LEVELS + 1];
static MPI_Comm cube;
/* In x, y and z: the number of parts, this rank's part, and the ranks of the parts before and after it. */
static int parts[3], part[3], before[3], after[3];

static void divide(void)
{
	int counts[3] = { 0 }, coordinates[3], periodic[3] = { 1, 1, 1 };

	ensure((ranks & (ranks - 1)) == 0, "MG: a power of two ranks", ranks, 1);
	/* The first count is the largest. It belongs to z, whose planes are contiguous. */
	MPI_Dims_create(ranks, 3, counts);
	MPI_Cart_create(MPI_COMM_WORLD, 3, counts, periodic, 0, &cube);
	MPI_Cart_coords(cube, rank, 3, coordinates);
	for (int d = 0; d < 3; d++) {
		parts[d] = counts[2 - d];
		part[d] = coordinates[2 - d];
		MPI_Cart_shift(cube, 2 - d, 1, &before[d], &after[d]);
	}
}

static void make_grid(struct grid *g, int points)
{
	g->whole = points < 2 * parts[2];
	g->step[0] = 1;
	for (int d = 0; d < 3; d++) {
		g->size[d] = g->whole ? points : points / parts[d];
		g->step[d + 1] = g->step[d] * (size_t)(g->size[d] + 2);
	}
	for (int d = 0; d < 3; d++) {
		MPI_Type_vector((int)(g->step[3] / g->step[d + 1]), (int)g->step[d], (int)g->step[d + 1], MPI_DOUBLE, &g->plane[d]);
		MPI_Type_commit(&g->plane[d]);
	}
	g->u = room(g->step[3], sizeof(double));
	g->r = room(g->step[3], sizeof(double));
}

static void free_grid(struct grid *g)
{
	for (int d = 0; d < 3; d++)
		MPI_Type_free(&g->plane[d]);
	free(g->u), free(g->r);
}

/*
 * Gets the outer planes of `a` from the neighbours, in x, then in y, then in z. A plane in y has the edges of the planes in x, and a plane
 * in z has the edges of both, so edges and corners arrive too.
 */
static void exchange(const struct grid *g, double *a)
{
	for (int d = 0; d < 3; d++) {
		size_t step = g->step[d], next = g->step[d + 1];
		double *low = a, *first = a + step, *last = a + step * (size_t)g->size[d], *high = last + step;
		MPI_Request all[4];

		if (g->whole || parts[d] == 1) {
			for (size_t i = 0; i < g->step[3]; i += next) {
				memcpy(low + i, last + i, step * sizeof *a);
				memcpy(high + i, first + i, step * sizeof *a);
			}
			continue;
		}
		MPI_Irecv(low, 1, g->plane[d], before[d], 0, cube, &all[0]);
		MPI_Irecv(high, 1, g->plane[d], after[d], 1, cube, &all[1]);
		MPI_Isend(last, 1, g->plane[d], after[d], 0, cube, &all[2]);
		MPI_Isend(first, 1, g->plane[d], before[d], 1, cube, &all[3]);
		MPI_Waitall(4, all, MPI_STATUSES_IGNORE);
	}
}

/* The sums that the operators need of the rows around the row `x`: of the 4 nearest rows, and of the next 4. */
struct sums {
	double near[MOST + 2], far[MOST + 2];
};

static void add_rows(const struct grid *g, const double *x, struct sums *s)
{
	const double *south = x - g->step[1], *north = x + g->step[1];
	size_t plane = g->step[2];

	for (int i = 0; i < g->size[0] + 2; i++) {
		s->near[i] = south[i] + north[i] + (x - plane)[i] + (x + plane)[i];
		s->far[i] = (south - plane)[i] + (north - plane)[i] + (south + plane)[i] + (north + plane)[i];
	}
}

static inline double weigh(const weights c, const double *x, const struct sums *s, int i)
{
	return c[0] * x[i] + c[1] * (x[i - 1] + x[i + 1] + s->near[i]) + c[2] * (s->near[i - 1] + s->near[i + 1] + s->far[i]) +
	       c[3] * (s->far[i - 1] + s->far[i + 1]);
}

/* `out` := `base` + the operator `c` of `in`. `base` and `out` may be the same. */
static void apply(const struct grid *g, const weights c, const double *in, const double *base, double *out)
{
	static struct sums s;

	for (int z = 1; z <= g->size[2]; z++)
		for (int y = 1; y <= g->size[1]; y++) {
			size_t row = (size_t)z * g->step[2] + (size_t)y * g->step[1];

			add_rows(g, in + row, &s);
			for (int i = 1; i <= g->size[0]; i++)
				out[row + (size_t)i] = base[row + (size_t)i] + weigh(c, in + row, &s, i);
		}
	exchange(g, out);
}

/* Where the part of a rank begins in the coarse grid, whose points are every second one of the fine grid. */
static size_t begin_in(const struct grid *coarse, const struct grid *fine)
{
	size_t begin = 0;

	for (int d = 0; d < 3 && coarse->whole && !fine->whole; d++)
		begin += coarse->step[d] * (size_t)(part[d] * fine->size[d] / 2);
	return begin;
}

static void restrict_residual(const struct grid *fine, const struct grid *coarse)
{
	static struct sums s;
	double *out = coarse->r + begin_in(coarse, fine);

	memset(coarse->r, 0, coarse->step[3] * sizeof(double));
	for (int z = 1; z <= fine->size[2] / 2; z++)
		for (int y = 1; y <= fine->size[1] / 2; y++) {
			const double *row = fine->r + 2 * ((size_t)z * fine->step[2] + (size_t)y * fine->step[1]);

			add_rows(fine, row, &s);
			for (int x = 1; x <= fine->size[0] / 2; x++)
				out[(size_t)z * coarse->step[2] + (size_t)y * coarse->step[1] + (size_t)x] = weigh(RESTRICTION, row, &s, 2 * x);
		}
	/* The parts of the other ranks are 0. */
	if (coarse->whole && !fine->whole)
		MPI_Allreduce(MPI_IN_PLACE, coarse->r, (int)coarse->step[3], MPI_DOUBLE, MPI_SUM, cube);
	exchange(coarse, coarse->r);
}

/* Adds the interpolated `u` of the coarse grid to the `u` of the fine grid, also to its outer planes, so that no message is needed. */
static void interpolate(const struct grid *coarse, const struct grid *fine)
{
	static double mean[MOST + 2];
	const double *in = coarse->u + begin_in(coarse, fine);

	for (int z = 0; z < fine->size[2] + 2; z++)
		for (int y = 0; y < fine->size[1] + 2; y++) {
			/* An even point of the fine grid is one of the coarse grid. An odd one is between two. */
			const double *a = in + (size_t)(z / 2) * coarse->step[2] + (size_t)(y / 2) * coarse->step[1];
			const double *b = a + (size_t)(y % 2) * coarse->step[1], *c = a + (size_t)(z % 2) * coarse->step[2];
			const double *d = c + (b - a);
			double *out = fine->u + (size_t)z * fine->step[2] + (size_t)y * fine->step[1];

			for (int x = 0; x < fine->size[0] / 2 + 2; x++)
				mean[x] = (a[x] + b[x] + c[x] + d[x]) / 4;
			for (int x = 0; x < fine->size[0] / 2 + 1; x++) {
				out[2 * x] += mean[x];
				out[2 * x + 1] += (mean[x] + mean[x + 1]) / 2;
			}
		}
}

/* Improves the `u` of the finest grid, whose residual for the charges `v` is known. */
static void cycle(int top, const weights smoother, const double *v)
{
	for (int k = top; k > 1; k--)
		restrict_residual(&grids[k], &grids[k - 1]);
	for (int k = 1; k <= top; k++) {
		struct grid *g = &grids[k];

		if (k < top)
			memset(g->u, 0, g->step[3] * sizeof(double));
		if (k > 1) {
			interpolate(&grids[k - 1], g);
			apply(g, MINUS_A, g->u, k < top ? g->r : v, g->r);
		}
		apply(g, smoother, g->r, g->u, g->u);
	}
}

/* A random number and the number of its point. */
struct number {
	uint64_t state, point;
};

static int lowest_first(const void *a, const void *b)
{
	const struct number *x = a, *y = b;

	return (x->state > y->state) - (x->state < y->state);
}

/* Keeps the number if it is among the lowest so far. `lowest` is in ascending order. */
static void keep(struct number *lowest, struct number n)
{
	int i = CHARGES - 1;

	if (n.state >= lowest[i].state)
		return;
	for (; i > 0 && lowest[i - 1].state > n.state; i--)
		lowest[i] = lowest[i - 1];
	lowest[i] = n;
}

/* Sets the charge of those points of this rank that are among the lowest of all ranks. */
static void charge(const struct grid *g, double *v, int log_size, const struct number *lowest, double value)
{
	struct number *all = room((size_t)ranks * CHARGES, sizeof *all);
	int mask = (1 << log_size) - 1;

	MPI_Allgather(lowest, 2 * CHARGES, MPI_UINT64_T, all, 2 * CHARGES, MPI_UINT64_T, cube);
	qsort(all, (size_t)ranks * CHARGES, sizeof *all, lowest_first);
	for (int i = 0; i < CHARGES; i++) {
		size_t at = 0;
		int mine = 1;

		for (int d = 0; d < 3; d++) {
			int place = ((int)(all[i].point >> d * log_size) & mask) - part[d] * g->size[d];

			mine &= place >= 0 && place < g->size[d];
			at += (size_t)(place + 1) * g->step[d];
		}
		if (mine)
			v[at] = value;
	}
	free(all);
}

/* The charges are 1 at the points with the ten largest of n^3 random numbers, and -1 at those with the ten smallest. */
static double *make_charges(const struct grid *g, int log_size)
{
	struct number smallest[CHARGES], largest[CHARGES];
	double *v = room(g->step[3], sizeof *v);

	for (int i = 0; i < CHARGES; i++)
		smallest[i] = largest[i] = (struct number){ UINT64_MAX, 0 };
	for (int z = 0; z < g->size[2]; z++)
		for (int y = 0; y < g->size[1]; y++) {
			uint64_t row = (uint64_t)(part[2] * g->size[2] + z) << log_size | (uint64_t)(part[1] * g->size[1] + y);
			uint64_t point = (row << log_size) + (uint64_t)(part[0] * g->size[0]), state = state_after(point);

			for (int x = 0; x < g->size[0]; x++, point++) {
				draw(&state);
				keep(smallest, (struct number){ state, point });
				/* The largest numbers are those whose complements are the lowest. */
				keep(largest, (struct number){ MASK - state, point });
			}
		}
	charge(g, v, log_size, smallest, -1);
	charge(g, v, log_size, largest, 1);
	exchange(g, v);
	return v;
}

static double norm(const struct grid *g, const double *a, int log_size)
{
	double here = 0, all = 0;

	for (int z = 1; z <= g->size[2]; z++)
		for (int y = 1; y <= g->size[1]; y++)
			for (int x = 1; x <= g->size[0]; x++) {
				double value = a[(size_t)z * g->step[2] + (size_t)y * g->step[1] + (size_t)x];

				here += value * value;
			}
	MPI_Allreduce(&here, &all, 1, MPI_DOUBLE, MPI_SUM, cube);
	return sqrt(ldexp(all, -3 * log_size));
}

static double run(size_t class)
{
	const struct class *c = &classes[class];
	int top = c->log_size;
	struct grid *finest = &grids[top];
	double *v, began, took, residual;

	divide();
	ensure(1 << top >= 2 * parts[2], "MG: too many ranks: parts", parts[2], (1 << top) / 2.0);
	for (int k = 1; k <= top; k++)
		make_grid(&grids[k], 1 << k);
	v = make_charges(finest, top);
	MPI_Barrier(cube);
	began = MPI_Wtime();
	apply(finest, MINUS_A, finest->u, v, finest->r);
	for (int turn = 0; turn < c->turns; turn++) {
		cycle(top, c->class == 'B' ? SMOOTHER_B : SMOOTHER, v);
		apply(finest, MINUS_A, finest->u, v, finest->r);
	}
	residual = norm(finest, finest->r, top);
	took = MPI_Wtime() - began;
	ensure(fabs(residual - c->norm) <= 1e-8 * c->norm, "MG: the norm of the residual", residual, c->norm);
	for (int k = 1; k <= top; k++)
		free_grid(&grids[k]);
	free(v);
	MPI_Comm_free(&cube);
	return took;
}

int main(int argc, char **argv)
{
	return run_class(argc, argv, "mg", "SWAB", run);
}
