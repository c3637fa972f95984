// y[m, n] = x[m, k] · w[n, k]ᵀ in bf16 with float32 sums, weights packed once.
//
// Packed layout: blocks of COLUMNS columns; within a block, for each pair of k, COLUMNS lanes of two bf16. A block of
// 32 columns is read as one stream, each 64-byte line feeding one dot product per row. n and k are padded with zeros.

#define VECTORS (COLUMNS / 16)

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t packed_bytes(int64_t n, int64_t k) { return ceil_div(n, COLUMNS) * COLUMNS * ceil_div(k, 2) * 4; }

// Packs the columns of block `b` to `to`.
static void pack_block(const bf16* w, bf16* to, int64_t b, int64_t n, int64_t k) {
  for (int64_t p = 0; p < ceil_div(k, 2); ++p)
    for (int64_t c = 0; c < COLUMNS; ++c)
      for (int64_t h = 0; h < 2; ++h) {
        int64_t column = b * COLUMNS + c, row = 2 * p + h;
        *to++ = column < n && row < k ? w[column * k + row] : 0;
      }
}

#if defined(__AVX512BF16__)
static inline void dot(Lanes& sum, Bits w, uint32_t x) {
  sum = (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)x));
}
#else
static inline void dot(Lanes& sum, Bits w, uint32_t x) {
  float even, odd;
  uint32_t low = x << 16, high = x & 0xffff0000u;
  memcpy(&even, &low, 4);
  memcpy(&odd, &high, 4);
  sum += (Lanes)(w << 16) * even;
  sum += (Lanes)(w & 0xffff0000u) * odd;
}
#endif

// Sums of R rows of x against one packed block.
template <int R>
static inline __attribute__((always_inline)) void multiply(const bf16* x, int64_t stride, const bf16* w, int64_t k,
                                                           Lanes (&sums)[R][VECTORS]) {
  // Few rows leave the dot products waiting for each other: more chains along k then.
  constexpr int CHAINS = R * VECTORS >= 8 ? 1 : K_UNROLL;
  Lanes acc[CHAINS][R][VECTORS] = {};
  const int64_t pairs = k / 2;
  int64_t p = 0;
  for (; p + CHAINS <= pairs; p += CHAINS)
#pragma GCC unroll 16
    for (int u = 0; u < CHAINS; ++u) {
      Bits block[VECTORS];
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) {
        const bf16* line = w + ((p + u) * VECTORS + v) * 32;
        memcpy(&block[v], line, 64);
        if (PREFETCH_BYTES > 0) __builtin_prefetch((const char*)line + PREFETCH_BYTES);
      }
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        uint32_t pair;
        memcpy(&pair, x + r * stride + 2 * (p + u), 4);
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; ++v) dot(acc[u][r][v], block[v], pair);
      }
    }
  for (; p < ceil_div(k, 2); ++p)
    for (int r = 0; r < R; ++r) {
      uint32_t pair = 0;  // the upper half stays zero past an odd k: zero times the padding, never NaN
      memcpy(&pair, x + r * stride + 2 * p, 2 * p + 1 < k ? 4 : 2);
      for (int v = 0; v < VECTORS; ++v) {
        Bits block;
        memcpy(&block, w + (p * VECTORS + v) * 32, 64);
        dot(acc[0][r][v], block, pair);
      }
    }
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) {
      sums[r][v] = acc[0][r][v];
      for (int u = 1; u < CHAINS; ++u) sums[r][v] += acc[u][r][v];
    }
}

static inline void store_row(bf16* y, const Lanes (&sums)[VECTORS], int64_t columns) {
#pragma GCC unroll 16
  for (int v = 0; v < VECTORS; ++v) {
    if (columns >= 16 * (v + 1))
      store(y + 16 * v, sums[v]);
    else if (columns > 16 * v)
      store_some(y + 16 * v, sums[v], columns - 16 * v);
  }
}
