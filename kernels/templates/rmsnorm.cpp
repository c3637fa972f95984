// RMSNorm, one pass for the squares and one for the result; a row stays in the first-level cache between them.

extern "C" void run_rmsnorm(const ELEMENT* x, const ELEMENT* w, float eps, ELEMENT* y, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows * cols >= PARALLEL_FROM) TEAM
  for (int64_t r = 0; r < rows; ++r) norm_row<true>(x + r * cols, w, eps, y + r * cols, cols);
}
