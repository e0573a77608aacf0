/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The simulated application LU of the NAS parallel benchmarks, implemented from its specification (NAS Technical Report
 * RNR-94-007). It finds the steady state of five equations of compressible flow on a cube by symmetric successive
 * over-relaxation. Norms of the residual and of the error, and an integral, must equal published values.
 *
 * The cube is divided in x and y. A sweep computes each point from its neighbours on one side, so a rank can begin with a
 * plane when the ranks on that side have sent their edges of it. The messages are small, and a wave of planes moves through
 * the ranks: LU needs a network with a low latency.
 *
 *   lu S|W|A
 */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "npb.h"

enum { EQUATIONS = 5, LAYERS = 2 };

struct class {
	char class;
	int size, turns;
	double step, residual[EQUATIONS], error[EQUATIONS], integral;
};

static const struct class classes[] = {
	{ 'S', 12, 50, 0.5,
	  { 1.6196343210976702e-02, 2.1976745164821318e-03, 1.5179927653399185e-03, 1.5029584435994323e-03, 3.4264073155896461e-02 },
	  { 6.4223319957960924e-04, 8.4144342047347926e-05, 5.8588269616485186e-05, 5.8474222595157350e-05, 1.3103347914111294e-03 },
	  7.8418928865937083e+00 },
	{ 'W', 33, 300, 1.5e-3,
	  { 0.1236511638192e+02, 0.1317228477799e+01, 0.2550120713095e+01, 0.2326187750252e+01, 0.2826799444189e+02 },
	  { 0.4867877144216e+00, 0.5064652880982e-01, 0.9281818101960e-01, 0.8570126542733e-01, 0.1084277417792e+01 },
	  0.1161399311023e+02 },
	{ 'A', 64, 250, 2.0,
	  { 7.7902107606689367e+02, 6.3402765259692870e+01, 1.9499249727292479e+02, 1.7845301160418537e+02, 1.8384760349464247e+03 },
	  { 2.9964085685471943e+01, 2.8194576365003349e+00, 7.3473412698774742e+00, 6.7139225687777051e+00, 7.0715315688392578e+01 },
	  2.6030925604886277e+01 },
};

/* The exact solution of an equation is C1 + C2 x + C3 y + C4 z + C5 x^2 + ... + C13 z^4. */
static const double SOLUTION[EQUATIONS][13] = {
	{ 2, 0, 0, 4, 5, 3, 0.5, 0.02, 0.01, 0.03, 0.5, 0.4, 0.3 },
	{ 1, 0, 0, 0, 1, 2, 3, 0.01, 0.03, 0.02, 0.4, 0.3, 0.5 },
	{ 2, 2, 0, 0, 0, 2, 3, 0.04, 0.03, 0.05, 0.3, 0.5, 0.4 },
	{ 2, 2, 0, 0, 0, 2, 3, 0.03, 0.05, 0.04, 0.2, 0.1, 0.3 },
	{ 5, 4, 3, 2, 0.1, 0.4, 0.3, 0.05, 0.04, 0.03, 0.1, 0.3, 0.2 },
};

/* k2, k3 k4 and k1 k5 of the specification; the second-order dissipation in x, y and z, and that of fourth order. */
static const double K2 = 0.4, K34 = 0.1, K15 = 1.4 * 1.4, DAMPING[3] = { 0.75, 0.75, 1 }, FOURTH = 0.25;
static const double OMEGA = 1.2;

/*
 * This rank's block of the cube. Arrays have EQUATIONS values for each point. Around the block are LAYERS points of the
 * neighbours in x and y.
 */
static struct {
	/* The points of the cube in each direction; the block's first point and number of points in x, y and z. */
	int n, first[3], size[3];
	/* The points of the block within the boundary of the cube: from `begin` to `end` - 1. */
	int begin[3], end[3];
	/* The distances in memory between neighbours in x, y and z, and the number of values. */
	size_t step[4];
	/* The ranks of the neighbours in x and y. */
	int before[2], after[2];
	MPI_Comm square;
	/* LAYERS layers of all planes in x and y, and one layer of one plane. */
	MPI_Datatype layers[2], edge[2];
	/* The pseudo-time step, and the factors of first and second differences. */
	double time, first_difference, second_difference;
} b;

static size_t at(int x, int y, int z)
{
	return (size_t)(x + LAYERS) * b.step[0] + (size_t)(y + LAYERS) * b.step[1] + (size_t)z * b.step[2];
}

static void divide(const struct class *c)
{
	int counts[2] = { 0 }, part[2], open[2] = { 0, 0 };

	b.n = c->size;
	b.time = c->step;
	b.first_difference = (b.n - 1) / 2.0;
	b.second_difference = (b.n - 1) * (b.n - 1);
	MPI_Dims_create(ranks, 2, counts);
	MPI_Cart_create(MPI_COMM_WORLD, 2, counts, open, 0, &b.square);
	MPI_Cart_coords(b.square, rank, 2, part);
	b.step[0] = EQUATIONS;
	for (int d = 0; d < 3; d++) {
		b.size[d] = b.n;
		if (d < 2) {
			b.first[d] = (int)begin_of((size_t)b.n, part[d], counts[d]);
			b.size[d] = (int)begin_of((size_t)b.n, part[d] + 1, counts[d]) - b.first[d];
			MPI_Cart_shift(b.square, d, 1, &b.before[d], &b.after[d]);
			ensure(b.n / counts[d] > LAYERS, "LU: too many ranks: points", b.n / counts[d], LAYERS + 1);
		}
		b.begin[d] = b.first[d] == 0;
		b.end[d] = b.size[d] - (b.first[d] + b.size[d] == b.n);
		b.step[d + 1] = b.step[d] * (size_t)(b.size[d] + (d < 2 ? 2 * LAYERS : 0));
	}
	for (int d = 0; d < 2; d++) {
		int length = (int)b.step[d], next = (int)b.step[d + 1];

		MPI_Type_vector((int)(b.step[3] / b.step[d + 1]), LAYERS * length, next, MPI_DOUBLE, &b.layers[d]);
		MPI_Type_commit(&b.layers[d]);
	}
	MPI_Type_vector(b.size[1], EQUATIONS, (int)b.step[1], MPI_DOUBLE, &b.edge[0]);
	MPI_Type_contiguous(b.size[0] * EQUATIONS, MPI_DOUBLE, &b.edge[1]);
	for (int d = 0; d < 2; d++)
		MPI_Type_commit(&b.edge[d]);
}

/* Gets the layers around the block. No operator needs their corners. */
static void exchange(double *u)
{
	MPI_Request all[8];
	int count = 0;

	for (int d = 0; d < 2; d++) {
		double *first = u + LAYERS * b.step[d], *end = first + (size_t)b.size[d] * b.step[d];

		MPI_Irecv(u, 1, b.layers[d], b.before[d], d, b.square, &all[count++]);
		MPI_Irecv(end, 1, b.layers[d], b.after[d], d + 2, b.square, &all[count++]);
		MPI_Isend(end - LAYERS * b.step[d], 1, b.layers[d], b.after[d], d, b.square, &all[count++]);
		MPI_Isend(first, 1, b.layers[d], b.before[d], d + 2, b.square, &all[count++]);
	}
	MPI_Waitall(count, all, MPI_STATUSES_IGNORE);
}

/* ---------------------------------------------------------------- the equations */

static void exact(const double place[3], double *u)
{
	for (int m = 0; m < EQUATIONS; m++) {
		u[m] = SOLUTION[m][0];
		for (int d = 0; d < 3; d++) {
			const double *c = SOLUTION[m] + 1 + d;

			u[m] += place[d] * (c[0] + place[d] * (c[3] + place[d] * (c[6] + place[d] * c[9])));
		}
	}
}

/*
 * Computes, at a point with the values u, the flux f in direction d and the values w. The equations contain the second
 * derivative of w, which describes viscosity and second-order dissipation.
 */
static inline void fluxes(const double *u, int d, double *f, double *w)
{
	double inverse = 1 / u[0], v[3], square = 0, pressure;

	for (int m = 0; m < 3; m++) {
		v[m] = u[1 + m] * inverse;
		square += v[m] * v[m];
	}
	pressure = K2 * (u[4] - 0.5 * u[0] * square);
	f[0] = u[1 + d];
	w[0] = DAMPING[d] * u[0];
	for (int m = 0; m < 3; m++) {
		f[1 + m] = u[1 + m] * v[d] + (m == d ? pressure : 0);
		w[1 + m] = DAMPING[d] * u[1 + m] + (m == d ? 4.0 / 3 : 1) * K34 * v[m];
	}
	f[4] = (u[4] + pressure) * v[d];
	w[4] = DAMPING[d] * u[4] + K34 * (0.5 * (1 - K15) * square + v[d] * v[d] / 6 + K15 * u[4] * inverse);
}

/*
 * Adds to `sum` the product of a matrix and the vector t. The matrix is `convection` df/du - `diffusion` dw/du at a point. It
 * is not computed, because the product is the derivative in the direction of t.
 */
static inline void add_product(const double *u, const double *t, int d, double convection, double diffusion, double *sum)
{
	double inverse = 1 / u[0], v[3], dv[3], square = 0, dkinetic = 0, pressure, dpressure, dw;

	for (int m = 0; m < 3; m++) {
		v[m] = u[1 + m] * inverse;
		dv[m] = (t[1 + m] - v[m] * t[0]) * inverse;
		square += v[m] * v[m];
		dkinetic += v[m] * t[1 + m];
	}
	pressure = K2 * (u[4] - 0.5 * u[0] * square);
	dpressure = K2 * (t[4] - dkinetic + 0.5 * square * t[0]);
	sum[0] += convection * t[1 + d] - diffusion * DAMPING[d] * t[0];
	dw = DAMPING[d] * t[4] + K34 * K15 * (t[4] - u[4] * inverse * t[0]) * inverse;
	for (int m = 0; m < 3; m++) {
		double viscosity = (m == d ? 4.0 / 3 : 1) * K34;

		sum[1 + m] += convection * (t[1 + m] * v[d] + u[1 + m] * dv[d] + (m == d ? dpressure : 0)) -
			      diffusion * (DAMPING[d] * t[1 + m] + viscosity * dv[m]);
		dw += (viscosity - K34 * K15) * v[m] * dv[m];
	}
	sum[4] += convection * ((t[4] + dpressure) * v[d] + (u[4] + pressure) * dv[d]) - diffusion * dw;
}

/*
 * Solves D x = t for the diagonal block D at a point: the identity and twice the sum of the second derivatives in the three
 * directions. x replaces t. D is lower triangular, so the rows are solved one after the other.
 */
static inline void solve_diagonal(const double *u, double *t)
{
	const double twice = 2 * b.time * b.second_difference, common = 1 + twice * (DAMPING[0] + DAMPING[1] + DAMPING[2]);
	/* Of the three directions, one has the viscosity 4/3. */
	const double viscosity = twice * K34 * 10 / 3, heat = twice * K34 * K15 * 3;
	double inverse = 1 / u[0], work = 0;

	t[0] /= common;
	for (int m = 1; m < 4; m++) {
		double v = u[m] * inverse;

		t[m] = (t[m] + viscosity * inverse * v * t[0]) / (common + viscosity * inverse);
		work += v * (t[m] - v * t[0]) * inverse;
	}
	t[4] = (t[4] - (viscosity - heat) * work + heat * u[4] * inverse * inverse * t[0]) / (common + heat * inverse);
}

/* ---------------------------------------------------------------- the residual */

/*
 * Adds the derivatives in direction d to r, along a line that begins at u and has `width` neighbouring points of the block at
 * each step. `work` has room for the fluxes and w of the line.
 */
static void add_line(const double *u, double *r, int d, int width, double *work)
{
	int begin = b.begin[d], end = b.end[d], low = -b.first[d], high = low + b.n - 1;
	size_t step = b.step[d], values = (size_t)width * EQUATIONS;
	double *f = work, *w = work + (size_t)(end - begin + 2) * values;

	for (int p = begin - 1; p <= end; p++)
		for (size_t i = 0; i < values; i += EQUATIONS) {
			size_t to = (size_t)(p - begin + 1) * values + i;

			fluxes(u + (ptrdiff_t)p * (ptrdiff_t)step + i, d, f + to, w + to);
		}
	for (int p = begin; p < end; p++) {
		/* The fourth difference omits points on and beyond the boundary. Next to the boundary the middle point has less weight. */
		int far_before = p - 2 > low, far_after = p + 2 < high, before = p - 1 > low, after = p + 1 < high;
		double middle = before && after ? 6 : 5;
		const double *x = u + (size_t)p * step, *x1 = x - step, *x2 = far_before ? x1 - step : x;
		const double *y1 = x + step, *y2 = far_after ? y1 + step : x;
		const double *f0 = f + (size_t)(p - begin) * values, *f1 = f0 + values, *f2 = f1 + values;
		const double *w0 = w + (f0 - f), *w1 = w0 + values, *w2 = w1 + values;
		double *out = r + (size_t)p * step;

		for (size_t i = 0; i < values; i++)
			out[i] += b.second_difference * (w0[i] - 2 * w1[i] + w2[i]) - b.first_difference * (f2[i] - f0[i]) -
				  FOURTH * (far_before * x2[i] - 4 * before * x1[i] + middle * x[i] - 4 * after * y1[i] + far_after * y2[i]);
	}
}

/* r := `constant` + the derivatives of u. The layers around the block are up to date in u. */
static void residual(const double *u, const double *constant, double *r, double *work)
{
	int width = b.end[0] - b.begin[0];

	memcpy(r, constant, b.step[3] * sizeof *r);
	for (int z = b.begin[2]; z < b.end[2]; z++) {
		size_t row = at(b.begin[0], 0, z);

		for (int y = b.begin[1]; y < b.end[1]; y++)
			add_line(u + at(0, y, z), r + at(0, y, z), 0, 1, work);
		add_line(u + row, r + row, 1, width, work);
	}
	for (int y = b.begin[1]; y < b.end[1]; y++) {
		size_t row = at(b.begin[0], y, 0);

		add_line(u + row, r + row, 2, width, work);
	}
}

/* ---------------------------------------------------------------- the sweeps */

/* Adds to `sum` the product of the blocks below the diagonal (`side` -1) or above it (1) and the vector r, at a point. */
static inline void neighbours(const double *u, const double *r, int side, double *sum)
{
	double convection = side * b.time * b.first_difference, diffusion = b.time * b.second_difference;

	for (int d = 0; d < 3; d++) {
		ptrdiff_t next = side * (ptrdiff_t)b.step[d];

		add_product(u + next, r + next, d, convection, diffusion, sum);
	}
}

/* Solves (D + omega Y) t = time r, for the blocks Y below the diagonal. t replaces r. */
static void lower_point(const double *u, double *r)
{
	double sum[EQUATIONS] = { 0 };

	neighbours(u, r, -1, sum);
	for (int m = 0; m < EQUATIONS; m++)
		r[m] = b.time * r[m] - OMEGA * sum[m];
	solve_diagonal(u, r);
}

/* Solves (I + omega D^-1 Z) t = r, for the blocks Z above the diagonal. t replaces r. */
static void upper_point(const double *u, double *r)
{
	double sum[EQUATIONS] = { 0 };

	neighbours(u, r, 1, sum);
	solve_diagonal(u, sum);
	for (int m = 0; m < EQUATIONS; m++)
		r[m] -= OMEGA * sum[m];
}

static void lower_sweep(const double *u, double *r)
{
	for (int z = b.begin[2]; z < b.end[2]; z++) {
		MPI_Recv(r + at(-1, 0, z), 1, b.edge[0], b.before[0], 0, b.square, MPI_STATUS_IGNORE);
		MPI_Recv(r + at(0, -1, z), 1, b.edge[1], b.before[1], 0, b.square, MPI_STATUS_IGNORE);
		for (int y = b.begin[1]; y < b.end[1]; y++)
			for (int x = b.begin[0]; x < b.end[0]; x++)
				lower_point(u + at(x, y, z), r + at(x, y, z));
		MPI_Send(r + at(b.size[0] - 1, 0, z), 1, b.edge[0], b.after[0], 0, b.square);
		MPI_Send(r + at(0, b.size[1] - 1, z), 1, b.edge[1], b.after[1], 0, b.square);
	}
}

static void upper_sweep(const double *u, double *r)
{
	for (int z = b.end[2] - 1; z >= b.begin[2]; z--) {
		MPI_Recv(r + at(b.size[0], 0, z), 1, b.edge[0], b.after[0], 0, b.square, MPI_STATUS_IGNORE);
		MPI_Recv(r + at(0, b.size[1], z), 1, b.edge[1], b.after[1], 0, b.square, MPI_STATUS_IGNORE);
		for (int y = b.end[1] - 1; y >= b.begin[1]; y--)
			for (int x = b.end[0] - 1; x >= b.begin[0]; x--)
				upper_point(u + at(x, y, z), r + at(x, y, z));
		MPI_Send(r + at(0, 0, z), 1, b.edge[0], b.before[0], 0, b.square);
		MPI_Send(r + at(0, 0, z), 1, b.edge[1], b.before[1], 0, b.square);
	}
}

/* ---------------------------------------------------------------- the run */

/* Sets u to the exact values in the block. */
static void set_exact(double *u)
{
	for (int z = 0; z < b.size[2]; z++)
		for (int y = 0; y < b.size[1]; y++)
			for (int x = 0; x < b.size[0]; x++) {
				double h = 1.0 / (b.n - 1), place[3] = { h * (x + b.first[0]), h * (y + b.first[1]), h * z };

				exact(place, u + at(x, y, z));
			}
}

/*
 * At the boundary, u has the exact values and keeps them. Elsewhere it begins with a blend of the three linear interpolations
 * between opposite points of the boundary.
 */
static void set_initial(double *u)
{
	set_exact(u);
	for (int z = b.begin[2]; z < b.end[2]; z++)
		for (int y = b.begin[1]; y < b.end[1]; y++)
			for (int x = b.begin[0]; x < b.end[0]; x++) {
				double h = 1.0 / (b.n - 1), place[3] = { h * (x + b.first[0]), h * (y + b.first[1]), h * z };
				double between[3][EQUATIONS], low[EQUATIONS], high[EQUATIONS];

				for (int d = 0; d < 3; d++) {
					double here = place[d];

					place[d] = 0;
					exact(place, low);
					place[d] = 1;
					exact(place, high);
					place[d] = here;
					for (int m = 0; m < EQUATIONS; m++)
						between[d][m] = (1 - here) * low[m] + here * high[m];
				}
				/* p + q + s - pq - qs - sp + pqs */
				for (int m = 0; m < EQUATIONS; m++)
					u[at(x, y, z) + (size_t)m] =
						1 - (1 - between[0][m]) * (1 - between[1][m]) * (1 - between[2][m]);
			}
}

/* The root mean square of each equation's values within the boundary. */
static void norms(const double *a, double *result)
{
	double here[EQUATIONS] = { 0 };

	for (int z = b.begin[2]; z < b.end[2]; z++)
		for (int y = b.begin[1]; y < b.end[1]; y++)
			for (int x = b.begin[0]; x < b.end[0]; x++)
				for (int m = 0; m < EQUATIONS; m++)
					here[m] += a[at(x, y, z) + (size_t)m] * a[at(x, y, z) + (size_t)m];
	MPI_Allreduce(here, result, EQUATIONS, MPI_DOUBLE, MPI_SUM, b.square);
	for (int m = 0; m < EQUATIONS; m++)
		result[m] = sqrt(result[m] / pow(b.n - 2, 3));
}

/* The integral of the pressure over the surface of a box within the cube, by the trapezoid rule. */
static double integral(const double *u)
{
	const int low[3] = { 1, 1, 2 }, high[3] = { b.n - 2, b.n - 3, b.n - 2 };
	double here = 0, all = 0;

	for (int z = 0; z < b.size[2]; z++)
		for (int y = 0; y < b.size[1]; y++)
			for (int x = 0; x < b.size[0]; x++) {
				const double *v = u + at(x, y, z);
				int place[3] = { x + b.first[0], y + b.first[1], z }, ends[3], inside = 1, weight = 0;

				for (int d = 0; d < 3; d++) {
					inside &= place[d] >= low[d] && place[d] <= high[d];
					ends[d] = place[d] == low[d] || place[d] == high[d];
				}
				/* On a face of the box, a point on an edge has half the weight of an inner point, and a corner a quarter. */
				for (int d = 0; d < 3 && inside; d++)
					weight += ends[d] * (2 - ends[(d + 1) % 3]) * (2 - ends[(d + 2) % 3]);
				here += weight * K2 * (v[4] - 0.5 * (v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / v[0]);
			}
	MPI_Allreduce(&here, &all, 1, MPI_DOUBLE, MPI_SUM, b.square);
	return 0.25 * all / b.second_difference;
}

static void check(const char *what, const double *got, const double *wanted, int count)
{
	for (int m = 0; m < count; m++)
		ensure(fabs(got[m] - wanted[m]) <= 1e-8 * fabs(wanted[m]), what, got[m], wanted[m]);
}

static void verify(const struct class *c, const double *u, const double *r, double *error)
{
	double got[EQUATIONS], surface = integral(u);

	norms(r, got);
	check("LU: a norm of the residual", got, c->residual, EQUATIONS);
	set_exact(error);
	for (size_t i = 0; i < b.step[3]; i++)
		error[i] -= u[i];
	norms(error, got);
	check("LU: a norm of the error", got, c->error, EQUATIONS);
	check("LU: the surface integral", &surface, &c->integral, 1);
}

static double run(size_t class)
{
	const struct class *c = &classes[class];
	double *u, *r, *forcing, *work, began, took;

	divide(c);
	u = room(b.step[3], sizeof *u);
	r = room(b.step[3], sizeof *r);
	forcing = room(b.step[3], sizeof *forcing);
	work = room((size_t)(b.n + 2) * (size_t)b.size[0], 2 * EQUATIONS * sizeof *work);
	/* The forcing term is the negative residual of the exact values, so that their residual with the forcing term is 0. */
	set_exact(u);
	exchange(u);
	residual(u, forcing, r, work);
	for (size_t i = 0; i < b.step[3]; i++)
		forcing[i] = -r[i];
	set_initial(u);
	exchange(u);
	MPI_Barrier(b.square);
	began = MPI_Wtime();
	residual(u, forcing, r, work);
	for (int turn = 0; turn < c->turns; turn++) {
		lower_sweep(u, r);
		upper_sweep(u, r);
		for (size_t i = 0; i < b.step[3]; i++)
			u[i] += r[i] / (OMEGA * (2 - OMEGA));
		exchange(u);
		residual(u, forcing, r, work);
	}
	took = MPI_Wtime() - began;
	verify(c, u, r, forcing);
	for (int d = 0; d < 2; d++)
		MPI_Type_free(&b.layers[d]), MPI_Type_free(&b.edge[d]);
	free(u), free(r), free(forcing), free(work);
	MPI_Comm_free(&b.square);
	return took;
}

int main(int argc, char **argv)
{
	return run_class(argc, argv, "lu", "SWA", run);
}
