// Softmax of each row: largest, exponentials and their sum, scaling; the row stays in cache between the passes.

static void softmax_row(const ELEMENT* x, ELEMENT* y, int64_t cols, float* e) {
  Lanes top = splat(-INFINITY), total = {};
  int64_t c;
  for (c = 0; c < cols; c += 16) {
    Lanes v = cols - c >= 16 ? load(x + c) : load_some(x + c, cols - c, -INFINITY);
    top = v > top ? v : top;
  }
  const float most = largest(top);
  for (c = 0; c < cols; c += 16) {
    Lanes v = exp_lanes((cols - c >= 16 ? load(x + c) : load_some(x + c, cols - c, -INFINITY)) - most);
    for (int lane = cols - c; lane < 16; ++lane) v[lane] = 0.0f;
    store(e + c, v);
    total += v;
  }
  const float scale = 1.0f / sum(total);
  for (c = 0; c + 16 <= cols; c += 16) store(y + c, load(e + c) * scale);
  if (c < cols) store_some(y + c, load(e + c) * scale, cols - c);
}

extern "C" void run_softmax(const ELEMENT* x, ELEMENT* y, int64_t rows, int64_t cols) {
#pragma omp parallel if (rows * cols >= PARALLEL_FROM) TEAM
  {
    float* e = (float*)malloc((cols + 16) * sizeof(float));
#pragma omp for schedule(SCHEDULE)
    for (int64_t r = 0; r < rows; ++r) softmax_row(x + r * cols, y + r * cols, cols, e);
    free(e);
  }
}
