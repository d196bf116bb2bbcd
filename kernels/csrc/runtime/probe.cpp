// What this machine can do at most: arithmetic of one instruction, and reading memory, on all workers at once.
//
// Promises: rates over wall time, so that workers that wait for each other count as they do in an op; the instructions
// that the ops of this variant are made of, where they have many rows.
// Must not know: models, ops. Not tuned to flatter: the best of a few plain access patterns is the limit.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ops.h"
#include "runtime/context.h"
#include "simd/simd.h"

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Independent accumulators: enough to hide the latency of a multiply-add, few enough to stay in registers.
constexpr int kChains = kRegisters >= 32 ? 12 : kRegisters >= 8 ? 5 : 3;
constexpr int64_t kRounds = 1 << 14;  // between two looks at the clock: well under a millisecond

// Runs step(accumulator) on all chains for `seconds`; the number of calls.
template <typename Value, typename Step>
double spin(double seconds, Value start, const Step& step, volatile float* sink) {
  Value chains[kChains];
  for (Value& chain : chains) chain = start;
  int64_t rounds = 0;
  const Clock::time_point begin = Clock::now();
  do {
    for (int64_t i = 0; i < kRounds; ++i) {
      for (int j = 0; j < kChains; ++j) chains[j] = step(chains[j]);
    }
    rounds += kRounds;
  } while (since(begin) < seconds);
  float sum = 0;
  for (Value& chain : chains) sum += static_cast<float>(lane_sum(chain));
  *sink = sum;
  return static_cast<double>(rounds) * kChains;
}

enum Kind : int32_t { kFp32 = 0, kBf16 = 1, kInt8 = 2 };

#if defined(QUIRE_AMX)
// Products of tiles for `seconds`: two by two tiles of sums, as an op with many rows has them; the number of products.
template <bool kOfBytes>
double spin_tiles(double seconds) {
  constexpr int64_t kTileRounds = 1 << 10;  // a tile is much work, above all where it is emulated
  alignas(64) bf16 numbers[kTileHeight * kTileBytes / sizeof(bf16)];
  std::fill_n(numbers, kTileHeight * kTileBytes / sizeof(bf16), to_bf16(1.0f));  // or bytes of any kind
  const TilesInUse in_use;
  configure_tiles(kTileHeight, kTileHeight);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  tile_load<4>(numbers, kTileBytes);
  tile_load<5>(numbers, kTileBytes);
  tile_load<6>(numbers, kTileBytes);
  tile_load<7>(numbers, kTileBytes);
  int64_t rounds = 0;
  const Clock::time_point begin = Clock::now();
  do {
    for (int64_t i = 0; i < kTileRounds; ++i) {
      if constexpr (kOfBytes) {
        tile_dot_u8s8<0, 4, 6>();
        tile_dot_u8s8<1, 4, 7>();
        tile_dot_u8s8<2, 5, 6>();
        tile_dot_u8s8<3, 5, 7>();
      } else {
        tile_dot_bf16<0, 4, 6>();
        tile_dot_bf16<1, 4, 7>();
        tile_dot_bf16<2, 5, 6>();
        tile_dot_bf16<3, 5, 7>();
      }
    }
    rounds += kTileRounds;
  } while (since(begin) < seconds);
  return static_cast<double>(rounds) * 4;
}
#endif

// Runs one kind of instruction for `seconds`; the number of multiply-adds.
double multiply_adds(Kind kind, double seconds, volatile float* sink) {
  // Hidden from the compiler, which could otherwise fold a chain of equal steps.
  volatile float hidden_float = 1.0f;
  volatile int32_t hidden_int = 0x01010101;
#if defined(QUIRE_AMX)
  constexpr double kOfTile = kTileHeight * kTileWidth * kTileDepth;
  if (kind == kBf16) return spin_tiles<false>(seconds) * kOfTile * 2;
  if (kind == kInt8) return spin_tiles<true>(seconds) * kOfTile * 4;
#endif
  switch (kind) {
    case kFp32: {
      const Vec x = vset(hidden_float);
      return spin(seconds, vzero(), [x](Vec acc) { return vfma(x, x, acc); }, sink) * kLanes;
    }
    case kBf16: {
      bf16 pairs[2 * kLanes];
      std::fill_n(pairs, 2 * kLanes, to_bf16(hidden_float));
      const Pairs x = pload(pairs);
      const auto product = [x](Vec acc) { return pair_product(acc, pair_part<0>(x), pair_part<0>(x)); };
      return spin(seconds, vzero(), product, sink) * kLanes * (2 / kPairParts);
    }
    default: {
      const Ints x = quad_part<0>(iset(hidden_int));
      return spin(
                 seconds, izero(), [x](Ints acc) { return quad_product(acc, x, x); }, sink) *
             kLanes * (4 / kQuadParts);
    }
  }
}

// The instruction of each kind; empty where the hardware has none.
const char* instruction(Kind kind) {
  switch (kind) {
    case kFp32: return kFloatInstruction;
    case kBf16: return kPairInstruction;
    case kInt8: return kQuadInstruction;
  }
  return "";
}

typedef uint64_t Line __attribute__((vector_size(64)));

// Reads `lines` cache lines as `kStreams` sequential streams.
template <int kStreams, bool kPrefetch>
uint64_t read(const Line* data, int64_t lines) {
  constexpr int kPerStream = 8 / kStreams;
  constexpr int64_t kAhead = 64;  // lines: 4 KiB
  const int64_t part = lines / kStreams;
  Line sums[8] = {};
  for (int64_t i = 0; i + kPerStream <= part; i += kPerStream) {
    for (int stream = 0; stream < kStreams; ++stream) {
      const Line* from = data + stream * part + i;
      for (int j = 0; j < kPerStream; ++j) {
        if (kPrefetch) __builtin_prefetch(from + kAhead + j);
        sums[stream * kPerStream + j] ^= from[j];
      }
    }
  }
  uint64_t total = 0;
  for (const Line& sum : sums) {
    for (int lane = 0; lane < 8; ++lane) total ^= sum[lane];
  }
  return total;
}

using Reader = uint64_t (*)(const Line*, int64_t);
constexpr Reader kReaders[] = {read<1, false>, read<1, true>, read<4, false>, read<4, true>};

// Private memory in huge pages where the system gives them, as packed weights are.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Mapping() { munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

}  // namespace

QUIRE_API int32_t quire_probe_arithmetic(Context* context, int32_t kind, double seconds, double* result) {
  *result = 0;
  const Kind asked = static_cast<Kind>(kind);
  if (*instruction(asked) == 0) return 0;
  return guarded(context, [&] {
    const int workers = context->pool.size();
    std::vector<double> counts(static_cast<size_t>(workers));
    const Clock::time_point start = Clock::now();
    context->pool.run_on_all([&](int worker) {
      volatile float sink;
      counts[static_cast<size_t>(worker)] = multiply_adds(asked, seconds, &sink);
    });
    const double elapsed = since(start);
    double total = 0;
    for (const double count : counts) total += count;
    *result = total * 2 / elapsed;
  });
}

QUIRE_API const char* quire_probe_instruction(int32_t kind) { return instruction(static_cast<Kind>(kind)); }

QUIRE_API int32_t quire_probe_read(Context* context, int64_t bytes_per_worker, int32_t passes, double* result) {
  *result = 0;
  return guarded(context, [&] {
    const int workers = context->pool.size();
    const int64_t lines = bytes_per_worker / static_cast<int64_t>(sizeof(Line));
    const size_t each = static_cast<size_t>(lines) * sizeof(Line);
    const Mapping memory(each * static_cast<size_t>(workers));
    std::vector<uint64_t> sums(static_cast<size_t>(workers));
    const auto own = [&](int worker) { return memory.data() + each * static_cast<size_t>(worker); };
    // Written by the worker that reads it, so that its pages are near it.
    context->pool.run_on_all([&](int worker) { std::memset(own(worker), worker + 1, each); });
    for (const Reader reader : kReaders) {
      for (int32_t pass = 0; pass < passes; ++pass) {
        const Clock::time_point start = Clock::now();
        context->pool.run_on_all([&](int worker) {
          sums[static_cast<size_t>(worker)] ^= reader(reinterpret_cast<const Line*>(own(worker)), lines);
        });
        const double rate = static_cast<double>(each) * workers / since(start);
        if (rate > *result) *result = rate;
      }
    }
    volatile uint64_t sink = 0;
    for (const uint64_t sum : sums) sink = sink ^ sum;
  });
}

}  // namespace quire
