// A norm and the linear layer(s) behind it in one call: the normalised rows never leave the cache
// and are rounded once, not twice as in stock code.

extern "C" int64_t prepare_rmsnorm_linear_bytes(int64_t, int64_t n, int64_t k) { return packed_bytes(n, k) + 2 * k; }

extern "C" void prepare_rmsnorm_linear(const bf16* norm, const bf16* w, void* packed, int64_t, int64_t n, int64_t k) {
  ask_for_huge_pages(packed, packed_bytes(n, k));
  memcpy((char*)packed + packed_bytes(n, k), norm, 2 * k);
#pragma omp parallel TEAM
  pack(w, (bf16*)packed, n, k);
}

extern "C" void run_rmsnorm_linear(const bf16* x, const void* packed, float eps, bf16* y, int64_t m, int64_t n,
                                   int64_t k) {
  if (m <= 0) return;
  const bf16* norm = (const bf16*)((const char*)packed + packed_bytes(n, k));
  bf16* h = scratch(m * k);
#pragma omp parallel TEAM
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < m; ++r) norm_row<false>(x + r * k, norm, eps, h + r * k, k);
    gemm(h, (const bf16*)packed, y, m, n, k);
  }
}
