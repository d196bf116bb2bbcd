// Products by a library of compiled kernels, held against sums of integers: for test_wheel.py, also under an emulator.
//
//     products LIBRARY...
//
// All values are integers that each kind of weights has exactly, and all sums stay below 2^24, so that every order of
// adding them gives the same number: the results must be equal. Prints the name of each library's instruction set.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <vector>

#include "ops.h"

namespace quire {
namespace {

// A multiplicative generator of numbers (Lehmer), the same everywhere.
struct Numbers {
  uint64_t state = 12345;
  int between(int least, int most) {
    state = state * 48271 % 2147483647;
    return least + static_cast<int>(state % static_cast<uint64_t>(most - least + 1));
  }
};

template <typename Function>
Function* function(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

// Aligned as panels are.
struct Memory {
  explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes) + 64) {}
  char* data() { return bytes_.data() + 64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64; }

 private:
  std::vector<char> bytes_;
};

// The number of results [m, n] that differ, of x [m, columns] times w [n, columns]; -1: a call has failed.
int64_t differing(void* library, Context* context, WeightKind kind, int64_t m, int64_t n, int64_t columns) {
  // The largest value of every row is 127, so that its scale as bytes is 1.
  const int most = kind == WeightKind::kInt8 ? 127 : 9;
  Numbers numbers;
  auto drawn = [&](int64_t rows) {
    std::vector<int> values(static_cast<size_t>(rows * columns));
    for (int& value : values) value = numbers.between(-most, most);
    for (int64_t row = 0; row < rows; ++row) values[static_cast<size_t>(row * columns)] = most;
    return values;
  };
  const std::vector<int> w = drawn(n), x = drawn(m);
  std::vector<bf16> weights, rows;
  for (const int value : w) weights.push_back(to_bf16(static_cast<float>(value)));
  for (const int value : x) rows.push_back(to_bf16(static_cast<float>(value)));

  Linear packed{};
  packed.kind = kind;
  packed.n = n;
  packed.k = (columns + 31) / 32 * 32;
  packed.columns = columns;
  const int64_t panels = function<decltype(quire_panel_count)>(library, "quire_panel_count")(&packed);
  std::vector<int64_t> starts(static_cast<size_t>(panels + 1));
  std::vector<float> scales(static_cast<size_t>(panels * kPanelRows));
  std::vector<int32_t> sums(scales.size());
  packed.starts = starts.data();
  packed.scales = scales.data();
  packed.sums = sums.data();
  if (function<decltype(quire_lay_out)>(library, "quire_lay_out")(context, &packed, weights.data(), nullptr)) return -1;
  Memory memory(starts.back());
  packed.packed = memory.data();
  if (function<decltype(quire_pack)>(library, "quire_pack")(context, &packed, weights.data(), nullptr)) return -1;

  std::vector<float> out(static_cast<size_t>(m * n));
  const auto multiply = function<decltype(quire_norm_linear)>(library, "quire_norm_linear");
  if (multiply(context, &packed, rows.data(), m, nullptr, out.data(), Epilogue::kStoreFloat, nullptr, 0)) return -1;
  int64_t count = 0;
  for (int64_t row = 0; row < m; ++row) {
    for (int64_t column = 0; column < n; ++column) {
      int sum = 0;
      for (int64_t i = 0; i < columns; ++i) {
        sum += x[static_cast<size_t>(row * columns + i)] * w[static_cast<size_t>(column * columns + i)];
      }
      count += out[static_cast<size_t>(row * n + column)] != static_cast<float>(sum);
    }
  }
  return count;
}

int check(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const char* name = function<decltype(quire_variant)>(library, "quire_variant")();
  for (const int32_t threads : {1, 3}) {
    Context* context = function<decltype(quire_create)>(library, "quire_create")(threads, nullptr);
    if (context == nullptr) return std::fprintf(stderr, "%s: no workers\n", name), 1;
    for (const auto kind : {WeightKind::kBf16, WeightKind::kInt8}) {
      for (const int64_t m : {1, 2, 6, 7, 19}) {
        for (const int64_t n : {64, 200}) {
          for (const int64_t columns : {32, 72, 320}) {
            const int64_t count = differing(library, context, kind, m, n, columns);
            if (count != 0) {
              std::fprintf(stderr, "%s, kind %d: %ld of %ld x %ld results over %ld columns are wrong\n", name,
                           static_cast<int>(kind), static_cast<long>(count), static_cast<long>(m), static_cast<long>(n),
                           static_cast<long>(columns));
              return 1;
            }
          }
        }
      }
    }
    function<decltype(quire_destroy)>(library, "quire_destroy")(context);
  }
  std::puts(name);
  return 0;
}

}  // namespace
}  // namespace quire

int main(int count, char** paths) {
  int failed = 0;
  for (int i = 1; i < count; ++i) failed |= quire::check(paths[i]);
  return failed;
}
