// The whole SwiGLU block: gate and up side by side in one packed stream, silu and product in registers (rounded
// once, where stock code rounds four times), then down.

static int64_t gate_up_bytes(int64_t hidden, int64_t inner) { return 2 * packed_bytes(inner, hidden); }

extern "C" int64_t prepare_mlp_bytes(int64_t, int64_t hidden, int64_t inner) {
  return gate_up_bytes(hidden, inner) + packed_bytes(hidden, inner);
}

extern "C" void prepare_mlp(const bf16* gate, const bf16* up, const bf16* down, void* packed, int64_t, int64_t hidden,
                            int64_t inner) {
  ask_for_huge_pages(packed, prepare_mlp_bytes(0, hidden, inner));
  bf16* to = (bf16*)packed;
#pragma omp parallel TEAM
  {
#pragma omp for schedule(static)
    for (int64_t b = 0; b < ceil_div(inner, COLUMNS); ++b) {
      pack_block(gate, to + 2 * b * block_size(hidden), b, inner, hidden);
      pack_block(up, to + (2 * b + 1) * block_size(hidden), b, inner, hidden);
    }
    pack(down, to + gate_up_bytes(hidden, inner) / 2, hidden, inner);
  }
}

template <int R>
static void gate_up(const bf16* x, const bf16* w, bf16* h, int64_t inner, int64_t hidden, int64_t columns) {
  Lanes gate[R][VECTORS], up[R][VECTORS];
  multiply<R>(x, hidden, w, hidden, gate);
  multiply<R>(x, hidden, w + block_size(hidden), hidden, up);
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < VECTORS; ++v)
      gate[r][v] = silu(gate[r][v]) * up[r][v];
    store_row(h + r * inner, gate[r], columns);
  }
}

template <int R>
static void gate_up_of(int64_t rows, const bf16* x, const bf16* w, bf16* h, int64_t inner, int64_t hidden,
                       int64_t columns) {
  if (rows == R)
    gate_up<R>(x, w, h, inner, hidden, columns);
  else if constexpr (R > 1)
    gate_up_of<R - 1>(rows, x, w, h, inner, hidden, columns);
}

extern "C" void run_mlp(const bf16* x, const void* packed, bf16* y, int64_t m, int64_t hidden, int64_t inner) {
  if (m <= 0) return;
  const bf16* w = (const bf16*)packed;
  bf16* h = scratch(m * inner);
  const int64_t blocks = ceil_div(inner, COLUMNS), chunks = ceil_div(m, ROW_CHUNK), chunk = ceil_div(m, chunks);
#pragma omp parallel TEAM
  {
#pragma omp for collapse(2) schedule(SCHEDULE)
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t c = 0; c < chunks; ++c) {
        const int64_t first = c * chunk, last = least(first + chunk, m);
        const int64_t step = last > first ? ceil_div(last - first, ceil_div(last - first, ROWS)) : 1;
        for (int64_t r = first; r < last; r += step)
          gate_up_of<ROWS>(least(step, last - r), x + r * hidden, w + 2 * b * block_size(hidden),
                           h + r * inner + b * COLUMNS, inner, hidden, inner - b * COLUMNS);
      }
    gemm(h, w + gate_up_bytes(hidden, inner) / 2, y, m, hidden, inner);
  }
}
