// The fastest memory and arithmetic loops that we know how to write, for measuring what a CPU can do at most.
// Vector types of GCC and Clang make AVX-512, AVX2, NEON or plain code of one source; -march=native decides.
// Plain C interface; every function returns seconds, measured from the moment all threads stand at the barrier until
// the last one is through. Compiled and called by profiles/ceilings.py.

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kWidth = 64;
#elif defined(__AVX__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif
typedef long long Ints __attribute__((vector_size(kWidth)));
typedef float Floats __attribute__((vector_size(kWidth)));
constexpr size_t kLine = 64;
constexpr int kPerLine = kLine / kWidth;

static std::atomic<uint64_t> sink;  // keeps results alive

static uint64_t fold(const Ints& v) {
  uint64_t x = 0;
  for (int i = 0; i < kWidth / 8; ++i) x ^= static_cast<uint64_t>(v[i]);
  return x;
}

// One line is read, folded into accumulators.
static inline void take(const char* p, Ints* acc) {
  for (int i = 0; i < kPerLine; ++i) acc[i] ^= *reinterpret_cast<const Ints*>(p + i * kWidth);
}

template <int kStreams>
static void read_pass(const char* p, size_t bytes, size_t ahead) {
  Ints acc[4 * kPerLine] = {};
  const size_t part = bytes / kStreams / (4 * kLine / (kStreams < 4 ? kStreams : 4)) * (4 * kLine / (kStreams < 4 ? kStreams : 4));
  constexpr int kUnroll = kStreams < 4 ? 4 / kStreams : 1;  // four lines in flight in any case
  for (size_t i = 0; i < part; i += kUnroll * kLine)
    for (int s = 0; s < kStreams; ++s)
      for (int u = 0; u < kUnroll; ++u) {
        const char* q = p + s * part + i + u * kLine;
        if (ahead) __builtin_prefetch(q + ahead, 0, 3);
        take(q, acc + (s * kUnroll + u) % 4 * kPerLine);
      }
  Ints all = {};
  for (const Ints& a : acc) all ^= a;
  sink.fetch_xor(fold(all), std::memory_order_relaxed);
}

static inline void put(char* p, const Ints& v) { *reinterpret_cast<Ints*>(p) = v; }

static inline void put_past_caches(char* p, const Ints& v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), reinterpret_cast<const __m512i&>(v));
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<const __m256i&>(v));
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), reinterpret_cast<const __m128i&>(v));
#else
  put(p, v);
#endif
}

static void fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <int kStreams, bool kPast>
static void write_pass(char* p, size_t bytes) {
  const size_t part = bytes / kStreams / kLine * kLine;
  Ints v;
  memset(&v, 0x5a, sizeof v);
  for (size_t i = 0; i < part; i += kLine)
    for (int s = 0; s < kStreams; ++s)
      for (int w = 0; w < kPerLine; ++w) {
        char* q = p + s * part + i + w * kWidth;
        if (kPast) put_past_caches(q, v);
        else put(q, v);
      }
  if (kPast) fence();
}

template <int kStreams, bool kPast>
static void copy_pass(const char* from, char* to, size_t bytes, size_t ahead) {
  const size_t part = bytes / kStreams / kLine * kLine;
  for (size_t i = 0; i < part; i += kLine)
    for (int s = 0; s < kStreams; ++s)
      for (int w = 0; w < kPerLine; ++w) {
        const size_t at = s * part + i + w * kWidth;
        if (ahead && w == 0) __builtin_prefetch(from + at + ahead, 0, 3);
        const Ints v = *reinterpret_cast<const Ints*>(from + at);
        if (kPast) put_past_caches(to + at, v);
        else put(to + at, v);
      }
  if (kPast) fence();
}

// Twelve independent chains hide the latency of fused multiply-add on every CPU that we know.
constexpr int kChains = 12;

static void fma_f32(size_t rounds) {
  Floats acc[kChains], a, b;
  for (int j = 0; j < kWidth / 4; ++j) a[j] = 0.999f, b[j] = 1e-3f * j;
  for (Floats& c : acc) c = b;
  for (size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * a + b;
  }
  Floats all = acc[0];
  for (int c = 1; c < kChains; ++c) all += acc[c];
  sink.fetch_xor(static_cast<uint64_t>(all[0]), std::memory_order_relaxed);
}

#if defined(__AVX512BF16__)
static void dot_bf16(size_t rounds) {
  __m512 acc[kChains];
  for (__m512& c : acc) c = _mm512_setzero_ps();
  __m512i bits = _mm512_set1_epi16(0x3c00);  // a small positive bf16
  asm volatile("" : "+v"(bits));
  const __m512bh a = reinterpret_cast<__m512bh>(bits);
  for (size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], a, a);
  }
  float all = 0;
  for (__m512& c : acc) all += c[0];
  sink.fetch_xor(static_cast<uint64_t>(all), std::memory_order_relaxed);
}
#endif

#if defined(__AVX512VNNI__)
static void dot_int8(size_t rounds) {
  __m512i acc[kChains];
  for (__m512i& c : acc) c = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi8(1);
  asm volatile("" : "+v"(a));
  for (size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbusd_epi32(acc[c], a, a);
  }
  long long all = 0;
  for (__m512i& c : acc) all += c[0];
  sink.fetch_xor(static_cast<uint64_t>(all), std::memory_order_relaxed);
}
#endif

// Runs `work(thread)` on pinned threads; seconds from the barrier to the last thread's end.
template <typename Work>
static double together(int threads, const int* cpus, Work work) {
  using Clock = std::chrono::steady_clock;
  std::atomic<int> waiting{0};
  std::vector<Clock::time_point> starts(threads), ends(threads);
  auto body = [&](int t) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[t], &set);
    sched_setaffinity(0, sizeof set, &set);
    waiting.fetch_add(1);
    while (waiting.load() < threads) sched_yield();
    starts[t] = Clock::now();
    work(t);
    ends[t] = Clock::now();
  };
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) pool.emplace_back(body, t);
  for (std::thread& thread : pool) thread.join();
  Clock::time_point first = starts[0], last = ends[0];
  for (int t = 1; t < threads; ++t) {
    if (starts[t] < first) first = starts[t];
    if (ends[t] > last) last = ends[t];
  }
  return std::chrono::duration<double>(last - first).count();
}

extern "C" {

// Memory in huge pages where the system gives them, touched by pinned threads so that it lies near them.
void* ceilings_allocate(size_t bytes, int threads, const int* cpus) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  const size_t part = bytes / threads;
  together(threads, cpus, [&](int t) { memset(static_cast<char*>(p) + t * part, t + 1, part); });
  return p;
}

void ceilings_free(void* p, size_t bytes) { munmap(p, bytes); }

// Each thread reads its own slice of `bytes`, `passes` times.
double ceilings_read(const char* p, size_t bytes, int threads, const int* cpus, int passes, int streams, size_t ahead) {
  const size_t slice = bytes / threads / 4096 * 4096;
  return together(threads, cpus, [&](int t) {
    const char* mine = p + t * slice;
    for (int i = 0; i < passes; ++i) switch (streams) {
        case 1: read_pass<1>(mine, slice, ahead); break;
        case 2: read_pass<2>(mine, slice, ahead); break;
        case 4: read_pass<4>(mine, slice, ahead); break;
        case 8: read_pass<8>(mine, slice, ahead); break;
        default: read_pass<16>(mine, slice, ahead);
      }
  });
}

// `kind`: 0 stores, 1 stores past the caches, 2 memset.
double ceilings_write(char* p, size_t bytes, int threads, const int* cpus, int passes, int streams, int kind) {
  const size_t slice = bytes / threads / 4096 * 4096;
  return together(threads, cpus, [&](int t) {
    char* mine = p + t * slice;
    for (int i = 0; i < passes; ++i) {
      if (kind == 2) memset(mine, 0x5a, slice);
      else if (kind == 1 && streams == 1) write_pass<1, true>(mine, slice);
      else if (kind == 1) write_pass<4, true>(mine, slice);
      else if (streams == 1) write_pass<1, false>(mine, slice);
      else write_pass<4, false>(mine, slice);
    }
  });
}

// The first half of each slice is copied to the second. `kind` as above, 2 is memcpy.
double ceilings_copy(char* p, size_t bytes, int threads, const int* cpus, int passes, int streams, int kind, size_t ahead) {
  const size_t slice = bytes / threads / 8192 * 8192, half = slice / 2;
  return together(threads, cpus, [&](int t) {
    char* mine = p + t * slice;
    for (int i = 0; i < passes; ++i) {
      if (kind == 2) memcpy(mine + half, mine, half);
      else if (kind == 1 && streams == 1) copy_pass<1, true>(mine, mine + half, half, ahead);
      else if (kind == 1) copy_pass<4, true>(mine, mine + half, half, ahead);
      else if (streams == 1) copy_pass<1, false>(mine, mine + half, half, ahead);
      else copy_pass<4, false>(mine, mine + half, half, ahead);
    }
  });
}

// Operations (multiplications and additions) of one round on one thread; 0 where this CPU lacks the instruction.
// `kind`: 0 float32, 1 bfloat16, 2 int8.
double ceilings_operations(int kind) {
  if (kind == 0) return 2.0 * kChains * (kWidth / 4);
#if defined(__AVX512BF16__)
  if (kind == 1) return 2.0 * kChains * 32;
#endif
#if defined(__AVX512VNNI__)
  if (kind == 2) return 2.0 * kChains * 64;
#endif
  return 0;
}

double ceilings_arithmetic(int kind, int threads, const int* cpus, size_t rounds) {
  return together(threads, cpus, [&](int) {
    if (kind == 0) fma_f32(rounds);
#if defined(__AVX512BF16__)
    if (kind == 1) dot_bf16(rounds);
#endif
#if defined(__AVX512VNNI__)
    if (kind == 2) dot_int8(rounds);
#endif
  });
}
}
