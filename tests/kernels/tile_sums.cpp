// Sums of bf16 products in both ways of the variant amx, by the kernels' own headers: through tiles, all rows together,
// and in vectors, one to three rows at a time. For test_cpu_amx.py.
//
// Reads until there is no more: rows and steps as 32-bit integers, activations [rows][steps][2] and the weights of one
// panel [64][steps][2] as bf16. Writes for each: whether the panel was coded, as such an integer, then both sums
// [rows][64] as floats.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "gemm/gemm_tile.h"
#include "gemm/gemm_tiles.h"
#include "weights/bf16_weights.h"

namespace quire {
namespace {

template <typename T>
bool read(std::vector<T>& into) {
  return std::fread(into.data(), sizeof(T), into.size(), stdin) == into.size();
}
template <typename T>
void write(const std::vector<T>& from) {
  std::fwrite(from.data(), sizeof(T), from.size(), stdout);
}

// Aligned as the kernels' own memory.
struct Memory {
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes) + 64) {}
  char* data() { return bytes_.data() + 64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64; }

 private:
  std::vector<char> bytes_;
};

std::vector<float> through_tiles(const Linear& w, int64_t rows, const std::vector<bf16>& x) {
  const int64_t steps = w.k / 2;
  const TileBlocks blocks(rows, steps);
  Memory placed(blocks.bytes()), decoded(kTiledSlice * kStepBytes);
  for (int64_t row = 0; row < rows; ++row) {
    blocks.place(row, reinterpret_cast<const char*>(x.data() + row * w.k), w.k * 2, placed.data());
  }
  std::vector<float> sums(static_cast<size_t>(blocks.count * blocks.height * kPanelRows));
  const TiledPiece<Bf16Weights> piece(w, 0, blocks, 0, blocks.count, placed.data());
  const TilesInUse tiles;
  configure_tiles(static_cast<int>(blocks.first), static_cast<int>(piece.wide() ? blocks.first : blocks.second));
  const Prefetcher prefetcher(piece.num_passes(), piece.step_bytes(), 64);
  piece.multiply(Cold::kShared, nullptr, prefetcher, sums.data(), decoded.data());
  sums.resize(static_cast<size_t>(rows * kPanelRows));
  return sums;
}

std::vector<float> in_vectors(const Linear& w, int64_t rows, const std::vector<bf16>& x) {
  const int64_t steps = w.k / 2;
  std::vector<float> sums(static_cast<size_t>(rows * kPanelRows));
  const DenormalsAreZeros floats;
  for (int64_t row = 0, together = 1; row < rows; row += together, together = together % kChainedRows + 1) {
    const int64_t live = std::min(together, rows - row);
    const Placing<1> placing(live, steps, kChainedRows);
    const char* a = reinterpret_cast<const char*>(x.data() + row * w.k);
    float* to = sums.data() + row * kPanelRows;
    const auto ahead = [&] { return Ahead{w.packed, w.packed, 0, 0}; };
    // In two slices, the second of which carries on.
    for (int64_t step = 0, count = (steps / kTileDepth + 1) / 2 * kTileDepth; step < steps; step += count) {
      count = std::min(count, steps - step);
      const auto multiply = [&](const auto& weights) {
        any_tile<Bf16Weights, kChainedRows>(live, a + step * 4, placing, weights, count, to, step > 0, Cold::kNo,
                                            ahead);
      };
      if (Bf16Weights::is_coded(w, 0)) {
        multiply(CodedSteps(w.packed, step));
      } else {
        multiply(PlainSteps<Bf16Weights>(w.packed + step * kStepBytes));
      }
    }
  }
  return sums;
}

}  // namespace
}  // namespace quire

int main() {
  // Linux takes the permission for tile registers from a program that is executed anew; emulated ones need none.
  syscall(SYS_arch_prctl, 0x1023, 18);

  using namespace quire;
  std::vector<int32_t> sizes(2);
  while (read(sizes)) {
    const int64_t rows = sizes[0], k = 2 * sizes[1];
    std::vector<bf16> x(static_cast<size_t>(rows * k)), weights(static_cast<size_t>(kPanelRows * k));
    if (!read(x) || !read(weights)) return 1;
    int64_t starts[2] = {};
    Linear w{WeightKind::kBf16, 0, kPanelRows, k, k, nullptr, starts, nullptr, nullptr, nullptr};
    const Source source{weights.data(), nullptr};
    starts[1] = Bf16Weights::packed_bytes(w, source, 0);
    Memory packed(starts[1]), stage(2 * Bf16Weights::panel_bytes(w));
    w.packed = packed.data();
    Bf16Weights::pack(w, source, 0, stage.data(), {packed.data(), nullptr, nullptr});
    write(std::vector<int32_t>{Bf16Weights::is_coded(w, 0)});
    write(through_tiles(w, rows, x));
    write(in_vectors(w, rows, x));
  }
  return 0;
}
