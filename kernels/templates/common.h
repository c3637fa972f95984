// Sixteen float lanes, bf16 conversion and exp, for every CPU: GCC vector extensions, lowered to AVX-512, AVX2 or SSE.
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

static inline Lanes splat(float v) { return Lanes{} + v; }

static inline Lanes load(const float* p) {
  Lanes v;
  memcpy(&v, p, 64);
  return v;
}

static inline Lanes load(const bf16* p) {
  Halves h;
  memcpy(&h, p, 32);
  return (Lanes)(__builtin_convertvector(h, Bits) << 16);
}

// Round to nearest even; NaN stays NaN. AVX512_BF16 flushes denormals, the integer path keeps them.
static inline Halves narrow(Lanes v) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
  Bits u = (Bits)v;
  Bits rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v == v ? rounded : (Bits{} + 0x7fc0u), Halves);
#endif
}

static inline void store(float* p, Lanes v) { memcpy(p, &v, 64); }

static inline void store(bf16* p, Lanes v) {
  Halves h = narrow(v);
  memcpy(p, &h, 32);
}

// The first `count` < 16 elements; lanes past them read as `fill`.
template <typename T>
static inline Lanes load_some(const T* p, int64_t count, float fill = 0.0f) {
  T buffer[16];
  Lanes padded = splat(fill);
  store(buffer, padded);
  memcpy(buffer, p, count * sizeof(T));
  return load(buffer);
}

template <typename T>
static inline void store_some(T* p, Lanes v, int64_t count) {
  T buffer[16];
  store(buffer, v);
  memcpy(p, buffer, count * sizeof(T));
}

// What `v` is after a round trip through T: the rounding that stock code does between two operators.
static inline Lanes round_to(Lanes v, const float*) { return v; }
static inline Lanes round_to(Lanes v, const bf16*) { return (Lanes)(__builtin_convertvector(narrow(v), Bits) << 16); }

static inline float sum(Lanes v) {
  float total = 0.0f;
  for (int i = 8; i > 0; i /= 2)
    for (int j = 0; j < i; ++j) v[j] += v[j + i];
  total = v[0];
  return total;
}

static inline float largest(Lanes v) {
  float top = v[0];
  for (int i = 1; i < 16; ++i) top = (v[i] > top || v[i] != v[i]) ? v[i] : top;
  return top;
}

// exp to about 1 ulp: 2^n · p(r), |r| <= ln2/2, p a minimax polynomial of degree 6; denormal, inf and NaN as in libm.
static inline Lanes exp_lanes(Lanes x) {
  const Lanes high = splat(89.0f), low = splat(-104.0f), magic = splat(12582912.0f);
  x = x > high ? high : x;
  x = x < low ? low : x;
  Lanes shifted = x * 1.44269504088896f + magic;
  Lanes n = shifted - magic;
  Lanes r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Lanes p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints exponent = (Ints)shifted - (Ints)magic;
  Ints half = exponent >> 1;
  Lanes scale = (Lanes)((half + 127) << 23), rest = (Lanes)((exponent - half + 127) << 23);
  return p * scale * rest;
}

static inline Lanes silu(Lanes v) { return v / (1.0f + exp_lanes(-v)); }

// Weights are read once a step and exceed the TLB's reach on 4 KiB pages.
static inline void ask_for_huge_pages(void* p, int64_t bytes) {
  uintptr_t first = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, last = ((uintptr_t)p + bytes) & ~(uintptr_t)4095;
  if (last > first + (1 << 21)) madvise((void*)first, last - first, MADV_HUGEPAGE);
}
