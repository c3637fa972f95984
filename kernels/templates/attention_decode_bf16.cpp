// Attention of one new token per sequence over its cache: bf16 products, float32 scores, softmax and sums. All query
// heads of a kv head go over its keys and values together, block by block with a running softmax, so that the cache is
// read once; positions past `last` are never read.

#define GROUP (HEADS / KV_HEADS)   // query heads that share keys and values
#define PIECES ((DIM + 31) / 32)   // of a row: 32 bf16 each, what one dot product takes
#define TILES ((GROUP + QUERIES - 1) / QUERIES)
#define TILE ((GROUP + TILES - 1) / TILES)  // query heads whose sums are in registers together

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Piece `i` of a row, zeros past its end.
static inline Bits piece(const bf16* row, int i) {
  Bits v = {};
  if (32 * i + 32 <= DIM)
    memcpy(&v, row + 32 * i, 64);
  else
    memcpy(&v, row + 32 * i, 2 * (DIM % 32));
  if (PREFETCH_BYTES > 0) __builtin_prefetch((const char*)(row + 32 * i) + PREFETCH_BYTES);
  return v;
}

// Asks for `rows` rows that are read soon: keys and values are streams of their own, and either rests while the other
// is read.
static inline void fetch(const bf16* first, int64_t rows) {
  if (FETCH_AHEAD)
    for (int64_t byte = 0; byte < 2 * rows * DIM; byte += 64) __builtin_prefetch((const char*)first + byte);
}

// `mix` pairs the elements of two rows, so that a dot product adds both of them at once; `unmix` puts its sums in order.
#if defined(__AVX512BF16__)
static inline Lanes dot(Lanes sum, Bits a, Bits b) {
  return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
static inline void mix(Bits a, Bits b, Bits& low, Bits& high) {
  low = (Bits)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  high = (Bits)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
static inline void unmix(Lanes low, Lanes high, float* to) {
  for (int i = 0; i < 16; ++i) to[8 * (i / 4) + i % 4] = low[i], to[8 * (i / 4) + 4 + i % 4] = high[i];
}
#else
static inline Lanes dot(Lanes sum, Bits a, Bits b) {
  sum += (Lanes)(a << 16) * (Lanes)(b << 16);
  return sum + (Lanes)(a & 0xffff0000u) * (Lanes)(b & 0xffff0000u);
}
static inline void mix(Bits a, Bits b, Bits& low, Bits& high) {
  low = (a & 0xffffu) | (b << 16);
  high = (a >> 16) | (b & 0xffff0000u);
}
static inline void unmix(Lanes low, Lanes high, float* to) {
  for (int i = 0; i < 16; ++i) to[2 * i] = low[i], to[2 * i + 1] = high[i];
}
#endif

// Lanes with bit S clear: the sum of that lane and its partner (bit S set) in `a`; with it set: in `b`. Four such steps
// turn sixteen vectors into one that holds the sum of each.
template <int S>
static inline Lanes fold(Lanes a, Lanes b);
#define OWN(S, L) ((((L) >> S) & 1) * 16 + (L))
#define PARTNER(S, L) ((((L) >> S) & 1) * 16 + ((L) ^ (1 << S)))
#define SIXTEEN(F, S) \
  F(S, 0), F(S, 1), F(S, 2), F(S, 3), F(S, 4), F(S, 5), F(S, 6), F(S, 7), F(S, 8), F(S, 9), F(S, 10), F(S, 11), \
      F(S, 12), F(S, 13), F(S, 14), F(S, 15)
#define FOLD(S) \
  template <> \
  inline Lanes fold<S>(Lanes a, Lanes b) { \
    return __builtin_shufflevector(a, b, SIXTEEN(OWN, S)) + __builtin_shufflevector(a, b, SIXTEEN(PARTNER, S)); \
  }
FOLD(0)
FOLD(1)
FOLD(2)
FOLD(3)

static inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

static inline float most_of(Lanes v) {
  v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = larger(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

// What a query head has seen so far: its largest score, and sums relative to it.
struct Seen {
  Lanes out[2 * PIECES];  // as `mix` leaves it
  Lanes total;
  float most;
};

template <int R>
struct Scores {
  Lanes of[R];
};

// Products of R queries with 2^LEVEL rows of keys from `first` on, a row a lane. Without ALL the last of `count` rows
// stands in for those past it.
template <int R, int LEVEL, bool ALL>
static inline __attribute__((always_inline)) Scores<R> score(const Bits (&q)[R][PIECES], const bf16* k, int64_t first,
                                                             int64_t count) {
  Scores<R> s;
  if constexpr (LEVEL == 0) {
    const bf16* row = k + (ALL ? first : least(first, count - 1)) * DIM;
#pragma GCC unroll 8
    for (int i = 0; i < PIECES; ++i) {
      const Bits keys = piece(row, i);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) s.of[r] = dot(i ? s.of[r] : Lanes{}, keys, q[r][i]);
    }
  } else {
    constexpr int HALF = 1 << (LEVEL - 1);
    const Scores<R> a = score<R, LEVEL - 1, ALL>(q, k, first, count);
    const Scores<R> b = score<R, LEVEL - 1, ALL>(q, k, first + HALF, count);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) s.of[r] = fold<LEVEL - 1>(a.of[r], b.of[r]);
  }
  return s;
}

// Adds the rows `a` and, where there is one, `b` of the values, weighted by pairs of bf16.
template <int R>
static inline __attribute__((always_inline)) void add_rows(const bf16* a, const bf16* b,
                                                           const bf16 (&weights)[R][POSITIONS], int64_t at,
                                                           Lanes (&out)[R][2 * PIECES]) {
  Bits pair[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    uint32_t both;
    memcpy(&both, &weights[r][at], 4);
    pair[r] = Bits{} + both;
  }
#pragma GCC unroll 8
  for (int i = 0; i < PIECES; ++i) {
    Bits low, high;
    mix(piece(a, i), b ? piece(b, i) : Bits{}, low, high);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      out[r][2 * i] = dot(out[r][2 * i], low, pair[r]);
      out[r][2 * i + 1] = dot(out[r][2 * i + 1], high, pair[r]);
    }
  }
}

// One block of `count` <= POSITIONS positions for R query heads; `next` more come after it.
template <int R>
static void block(const Bits (*queries)[PIECES], const bf16* k, const bf16* v, int64_t count, int64_t next,
                  Seen* seen) {
  alignas(64) float scores[R][POSITIONS];
  alignas(64) bf16 weights[R][POSITIONS];
  const float scale = 1.0f / sqrtf((float)DIM);
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Bits q[R][PIECES];
  Lanes top[R];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < PIECES; ++i) q[r][i] = queries[r][i];
    top[r] = splat(-INFINITY);
  }
  int64_t t = 0;
  for (; t + 16 <= count; t += 16) {
    fetch(v + t * DIM, 16);
    const Scores<R> s = score<R, 4, true>(q, k + t * DIM, 0, 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes scaled = s.of[r] * scale;
      store(&scores[r][t], scaled);
      top[r] = larger(scaled, top[r]);
    }
  }
  if (t < count) {
    const Scores<R> s = score<R, 4, false>(q, k + t * DIM, 0, count - t);
    const Ints rest = Ints{} + (int32_t)(count - t);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes scaled = lane < rest ? s.of[r] * scale : splat(-INFINITY);
      store(&scores[r][t], scaled);
      top[r] = larger(scaled, top[r]);
    }
  }
  Lanes out[R][2 * PIECES];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const float before = seen[r].most, most = fmaxf(before, most_of(top[r]));
    const float shrink = exp_lanes(splat(before - most))[0];
    Lanes total = seen[r].total * shrink;
    for (int64_t p = 0; p < count; p += 16) {
      const Lanes e = exp_lanes(load(&scores[r][p]) - most);
      total += e;
      store(&weights[r][p], e);
    }
    seen[r].most = most;
    seen[r].total = total;
    for (int i = 0; i < 2 * PIECES; ++i) out[r][i] = seen[r].out[i] * shrink;
  }
  for (t = 0; t + 2 * UNROLL <= count; t += 2 * UNROLL) {
    if (t + 2 * UNROLL <= next) fetch(k + (count + t) * DIM, 2 * UNROLL);
#pragma GCC unroll 8
    for (int u = 0; u < 2 * UNROLL; u += 2) add_rows<R>(v + (t + u) * DIM, v + (t + u + 1) * DIM, weights, t + u, out);
  }
  for (; t + 2 <= count; t += 2) add_rows<R>(v + t * DIM, v + (t + 1) * DIM, weights, t, out);
  if (t < count) add_rows<R>(v + t * DIM, nullptr, weights, t, out);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < 2 * PIECES; ++i) seen[r].out[i] = out[r][i];
}

// Positions `first` to `end` of one kv head, for its query heads q[GROUP, DIM].
static void attend(const bf16* q, const bf16* k, const bf16* v, int64_t first, int64_t end, Seen* seen) {
  Bits queries[GROUP][PIECES];
  for (int g = 0; g < GROUP; ++g) {
    for (int i = 0; i < PIECES; ++i) {
      queries[g][i] = Bits{};
      memcpy(&queries[g][i], q + g * DIM + 32 * i, 2 * least(32, DIM - 32 * i));
    }
    seen[g] = Seen{};
    seen[g].most = -INFINITY;
  }
  for (int64_t p = first; p < end; p += POSITIONS) {
    const int64_t count = least(POSITIONS, end - p), next = end - p - count;
    int g = 0;
    for (; g + TILE <= GROUP; g += TILE) block<TILE>(queries + g, k + p * DIM, v + p * DIM, count, next, seen + g);
    if (g < GROUP) block<GROUP % TILE ? GROUP % TILE : 1>(queries + g, k + p * DIM, v + p * DIM, count, next, seen + g);
  }
}

// The result of one query head out of what `parts` stretches of its positions gave, GROUP apart.
static void finish(const Seen* seen, int parts, bf16* o) {
  float most = -INFINITY, total = 0.0f;
  alignas(64) float row[32 * PIECES];
  Lanes out[2 * PIECES] = {};
  for (int p = 0; p < parts; ++p) most = fmaxf(most, seen[p * GROUP].most);
  for (int p = 0; p < parts; ++p) {
    const Seen& one = seen[p * GROUP];
    const float share = parts > 1 ? exp_lanes(splat(one.most - most))[0] : 1.0f;
    total += share * sum(one.total);
    for (int i = 0; i < 2 * PIECES; ++i) out[i] += one.out[i] * share;
  }
  for (int i = 0; i < PIECES; ++i) unmix(out[2 * i] / total, out[2 * i + 1] / total, row + 32 * i);
  for (int d = 0; d < DIM; d += 16) {
    if (DIM - d >= 16)
      store(o + d, load(row + d));
    else
      store_some(o + d, load(row + d), DIM - d);
  }
}

// Room that lives as long as the calling thread and grows when needed.
static Seen* scratch(int64_t count) {
  static thread_local Seen* room = nullptr;
  static thread_local int64_t size = 0;
  if (count > size) {
    free(room);
    size = count;
    room = (Seen*)aligned_alloc(64, size * sizeof(Seen));
  }
  return room;
}

extern "C" void run_attention_decode(const bf16* q, const bf16* k, const bf16* v, const int64_t* last, bf16* o,
                                     int64_t batch, int64_t, int64_t, int64_t length, int64_t) {
  const int64_t pairs = batch * KV_HEADS;
  if (SPLIT == 1) {
#pragma omp parallel for schedule(SCHEDULE) TEAM
    for (int64_t n = 0; n < pairs; ++n) {
      Seen seen[GROUP];
      attend(q + n * GROUP * DIM, k + n * length * DIM, v + n * length * DIM, 0, least(last[n / KV_HEADS] + 1, length),
             seen);
      for (int g = 0; g < GROUP; ++g) finish(seen + g, 1, o + (n * GROUP + g) * DIM);
    }
    return;
  }
  Seen* seen = scratch(pairs * SPLIT * GROUP);
#pragma omp parallel TEAM
  {
#pragma omp for schedule(SCHEDULE)
    for (int64_t task = 0; task < pairs * SPLIT; ++task) {
      const int64_t n = task / SPLIT, part = task % SPLIT, end = least(last[n / KV_HEADS] + 1, length);
      const int64_t size = (end + 16 * SPLIT - 1) / (16 * SPLIT) * 16;  // whole vectors of positions
      attend(q + n * GROUP * DIM, k + n * length * DIM, v + n * length * DIM, least(part * size, end),
             least((part + 1) * size, end), seen + task * GROUP);
    }
#pragma omp for schedule(static)
    for (int64_t h = 0; h < pairs * GROUP; ++h)
      finish(seen + h / GROUP * SPLIT * GROUP + h % GROUP, SPLIT, o + h * DIM);
  }
}
