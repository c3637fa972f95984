// A bf16 linear layer on packed weights: bound by memory at few rows, blocked in registers at many.

extern "C" int64_t prepare_linear_bytes(int64_t, int64_t n, int64_t k) { return packed_bytes(n, k); }

extern "C" void prepare_linear(const bf16* w, void* packed, int64_t, int64_t n, int64_t k) {
  ask_for_huge_pages(packed, packed_bytes(n, k));
#pragma omp parallel TEAM
  pack(w, (bf16*)packed, n, k);
}

extern "C" void run_linear(const bf16* x, const void* packed, bf16* y, int64_t m, int64_t n, int64_t k) {
  if (m <= 0) return;
#pragma omp parallel TEAM
  gemm(x, (const bf16*)packed, y, m, n, k);
}
