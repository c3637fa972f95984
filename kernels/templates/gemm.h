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

// Rows of x against one packed block, R at a time, R <= ROWS.
template <int R>
static void tile(const bf16* x, const bf16* w, bf16* y, int64_t n, int64_t k, int64_t columns) {
  Lanes sums[R][VECTORS];
  multiply<R>(x, k, w, k, sums);
#pragma GCC unroll 32
  for (int r = 0; r < R; ++r) store_row(y + r * n, sums[r], columns);
}

template <int R>
static void tile_of(int64_t rows, const bf16* x, const bf16* w, bf16* y, int64_t n, int64_t k, int64_t columns) {
  if (rows == R)
    tile<R>(x, w, y, n, k, columns);
  else if constexpr (R > 1)
    tile_of<R - 1>(rows, x, w, y, n, k, columns);
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t block_size(int64_t k) { return COLUMNS * ceil_div(k, 2) * 2; }

// Packs w[n, k]. To be called by every thread of a team.
static void pack(const bf16* w, bf16* to, int64_t n, int64_t k) {
#pragma omp for schedule(static)
  for (int64_t b = 0; b < ceil_div(n, COLUMNS); ++b) pack_block(w, to + b * block_size(k), b, n, k);
}

// The whole product. To be called by every thread of a team; ends with a barrier.
static void gemm(const bf16* x, const bf16* packed, bf16* y, int64_t m, int64_t n, int64_t k) {
  const int64_t blocks = ceil_div(n, COLUMNS), chunks = ceil_div(m, ROW_CHUNK), chunk = ceil_div(m, chunks);
#pragma omp for collapse(2) schedule(SCHEDULE)
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = c * chunk, last = least(first + chunk, m);
      const int64_t step = last > first ? ceil_div(last - first, ceil_div(last - first, ROWS)) : 1;
      for (int64_t r = first; r < last; r += step)
        tile_of<ROWS>(least(step, last - r), x + r * k, packed + b * block_size(k), y + r * n + b * COLUMNS, n, k,
                      n - b * COLUMNS);
    }
}

// Room that lives as long as the calling thread and grows when needed.
static bf16* scratch(int64_t count) {
  static thread_local bf16* room = nullptr;
  static thread_local int64_t size = 0;
  if (count > size) {
    free(room);
    size = ceil_div(count, 32) * 32;
    room = (bf16*)aligned_alloc(64, size * sizeof(bf16));
  }
  return room;
}
