// y = w · x / sqrt(mean(x²) + eps) for one row; with ROUNDED also rounded before the weight, as Llama does.
template <bool ROUNDED, typename T>
static inline Lanes scaled(Lanes x, float scale, Lanes w, const T* like) {
  return (ROUNDED ? round_to(x * scale, like) : x * scale) * w;
}

template <bool ROUNDED, typename T>
static inline void norm_row(const T* x, const T* w, float eps, T* y, int64_t cols) {
  Lanes squares[NORM_UNROLL] = {};
  int64_t c = 0;
  for (; c + 16 * NORM_UNROLL <= cols; c += 16 * NORM_UNROLL)
#pragma GCC unroll 8
    for (int u = 0; u < NORM_UNROLL; ++u) {
      Lanes v = load(x + c + 16 * u);
      squares[u] += v * v;
    }
  for (; c < cols; c += 16) {
    Lanes v = cols - c >= 16 ? load(x + c) : load_some(x + c, cols - c);
    squares[0] += v * v;
  }
  for (int u = 1; u < NORM_UNROLL; ++u) squares[0] += squares[u];
  const float scale = 1.0f / sqrtf(sum(squares[0]) / (float)cols + eps);
  for (c = 0; c + 16 <= cols; c += 16) store(y + c, scaled<ROUNDED>(load(x + c), scale, load(w + c), y));
  const int64_t rest = cols - c;
  if (rest > 0)
    store_some(y + c, scaled<ROUNDED>(load_some(x + c, rest), scale, load_some(w + c, rest), y), rest);
}
