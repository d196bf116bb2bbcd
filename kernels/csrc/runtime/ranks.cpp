// The exchange of columns between processes of one machine, through memory that all of them map.
//
// Owns the mapping and its layout: a header with a flag for each rank, then two buffers in turn with a place for each
// rank. A rank writes its part, raises its flag to the exchange's number, waits for the others' flags and reads. It
// writes to the same buffer again two exchanges later, when everybody's flag tells that this one was read. Promises: a
// wait ends when the awaited process does, or after `patience`. Must not know: products, Python.
#include "runtime/ranks.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "ops.h"
#include "runtime/wait.h"

namespace quire {
namespace {

constexpr int64_t kPlaceBytes = 1 << 20;   // of one rank in one buffer; longer parts take several exchanges
constexpr int kSpins = 4000;               // about 50 us: longer than ranks of equal work are apart
constexpr timespec kLook{0, 100'000'000};  // between two looks whether the awaited process lives

static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share it");

struct alignas(64) Flag {
  std::atomic<uint32_t> exchange;  // how many exchanges the rank has begun, modulo 2^32
  std::atomic<uint32_t> sleepers;  // who sleep until it changes
  std::atomic<int32_t> pid;        // 0: the rank has not come yet
  std::atomic<int64_t> waited_ns;  // in gathers, until the others' parts were there
};

struct Header {
  std::atomic<uint32_t> lost;  // a rank has given up: so do all
  Flag flags[kMostRanks];
};

constexpr int64_t kHeaderBytes = (sizeof(Header) + 4095) / 4096 * 4096;

int64_t memory_bytes(int64_t size) { return kHeaderBytes + 2 * size * kPlaceBytes; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Between processes, unlike futex_wait in wait.h.
void sleep_on(std::atomic<uint32_t>* word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &kLook, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The bytes [from, to) of a part, which is `width` bytes of each row, between rows and a place where they lie together.
template <bool kToPlace>
void copy_part(char* rows, int64_t row_bytes, int64_t width, int64_t from, int64_t to, char* place) {
  for (int64_t at = from; at < to;) {
    const int64_t column = at % width, count = std::min(width - column, to - at);
    char* in_row = rows + at / width * row_bytes + column;
    char* in_place = place + at - from;
    std::memcpy(kToPlace ? in_place : in_row, kToPlace ? in_row : in_place, static_cast<size_t>(count));
    at += count;
  }
}

}  // namespace

struct RankMemory {
  RankMemory(char* memory, int32_t number, int32_t count, double patience)
      : header(reinterpret_cast<Header*>(memory)),
        places(memory + kHeaderBytes),
        rank(number),
        size(count),
        patience_ns(static_cast<int64_t>(patience * 1e9)) {
    std::fill(watched, watched + kMostRanks, -1);
    header->flags[number].pid.store(getpid(), std::memory_order_seq_cst);
  }
  ~RankMemory() {
    for (int fd : watched) {
      if (fd >= 0) close(fd);
    }
    munmap(reinterpret_cast<char*>(header), static_cast<size_t>(memory_bytes(size)));
  }
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  char* place(int32_t of) const { return places + ((exchange & 1) * size + of) * kPlaceBytes; }

  // Begins the next exchange: what this rank wrote before can be read.
  void raise() {
    Flag& own = header->flags[rank];
    own.exchange.store(exchange, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst) != 0) wake_all(&own.exchange);
  }

  // wait_for in a gather. What has come already costs no look at a clock.
  bool wait_for_part(int32_t other) {
    if (has_come(other, std::memory_order_acquire, exchange)) return true;
    const int64_t begin = now_ns();
    const bool found = wait_for(other, exchange, true);
    std::atomic<int64_t>& waited = header->flags[rank].waited_ns;  // which this rank alone writes
    waited.store(waited.load(std::memory_order_relaxed) + now_ns() - begin, std::memory_order_relaxed);
    return found;
  }

  bool has_come(int32_t other, std::memory_order order, uint32_t number) const {
    return static_cast<int32_t>(header->flags[other].exchange.load(order) - number) >= 0;
  }

  // Whether another rank has come as far as `number`; false: it will not. `bounded`: within the patience.
  bool wait_for(int32_t other, uint32_t number, bool bounded) {
    Flag& flag = header->flags[other];
    const auto came = [&](std::memory_order order) { return has_come(other, order, number); };
    for (int spins = 0; spins < kSpins; ++spins) {
      if (came(std::memory_order_acquire)) return true;
      relax();
    }
    const int64_t deadline = now_ns() + patience_ns;
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool found = false;
    for (;;) {
      const uint32_t seen = flag.exchange.load(std::memory_order_seq_cst);
      if ((found = came(std::memory_order_seq_cst))) break;
      if (header->lost.load(std::memory_order_seq_cst) != 0) break;
      sleep_on(&flag.exchange, seen);
      if ((found = came(std::memory_order_seq_cst))) break;
      if (!lives(other) && !(found = came(std::memory_order_seq_cst))) break;
      if (found || (bounded && now_ns() > deadline)) break;
    }
    flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return found;
  }

  // Tells the others that there is no use in waiting.
  int32_t give_up() {
    header->lost.store(1, std::memory_order_seq_cst);
    for (int32_t other = 0; other < size; ++other) wake_all(&header->flags[other].exchange);
    return kRankLost;
  }

  int32_t gather(char* data, int64_t rows, int64_t row_bytes, const int64_t* starts) {
    const auto width = [&](int32_t of) { return starts[of + 1] - starts[of]; };
    int64_t most = 0;
    for (int32_t other = 0; other < size; ++other) most = std::max(most, rows * width(other));
    for (int64_t from = 0; from < most; from += kPlaceBytes) {
      const auto end = [&](int32_t of) { return std::min(from + kPlaceBytes, rows * width(of)); };
      ++exchange;
      copy_part<true>(data + starts[rank], row_bytes, width(rank), from, end(rank), place(rank));
      raise();
      for (int32_t step = 1; step < size; ++step) {
        const int32_t other = (rank + step) % size;
        if (!wait_for_part(other)) return give_up();
        copy_part<false>(data + starts[other], row_bytes, width(other), from, end(other), place(other));
      }
    }
    return 0;
  }

  // Whether the process of a rank lives, as far as the system tells.
  bool lives(int32_t other) {
    const int32_t pid = header->flags[other].pid.load(std::memory_order_seq_cst);
    if (pid == 0) return true;
    if (watched[other] < 0) watched[other] = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (watched[other] < 0) return errno != ESRCH;
    pollfd ended{watched[other], POLLIN, 0};
    return poll(&ended, 1, 0) <= 0;
  }

  Header* const header;
  char* const places;
  const int32_t rank, size;
  const int64_t patience_ns;
  uint32_t exchange = 0;
  int watched[kMostRanks];  // descriptors of the others' processes; -1: none yet
};

QUIRE_API int64_t quire_ranks_bytes(int32_t size) { return memory_bytes(size); }

QUIRE_API RankMemory* quire_ranks_open(int32_t fd, int32_t rank, int32_t size, double patience) {
  struct stat file;
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size) return nullptr;
  if (fstat(fd, &file) != 0 || file.st_size != memory_bytes(size)) return nullptr;
  void* memory = mmap(nullptr, static_cast<size_t>(memory_bytes(size)), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  RankMemory* opened = new (std::nothrow) RankMemory(static_cast<char*>(memory), rank, size, patience);
  if (opened == nullptr) munmap(memory, static_cast<size_t>(memory_bytes(size)));
  return opened;
}

QUIRE_API void quire_ranks_close(RankMemory* memory) { delete memory; }

QUIRE_API int32_t quire_ranks_await(RankMemory* memory) {
  return memory->wait_for(0, memory->exchange + 1, false) ? 0 : memory->give_up();
}

QUIRE_API void quire_ranks_waited(RankMemory* memory, int64_t* ns) {
  for (int32_t each = 0; each < memory->size; ++each) {
    ns[each] = memory->header->flags[each].waited_ns.load(std::memory_order_relaxed);
  }
}

QUIRE_API int32_t quire_ranks_gather(void* memory, char* data, int64_t rows, int64_t row_bytes, const int64_t* starts) {
  return static_cast<RankMemory*>(memory)->gather(data, rows, row_bytes, starts);
}

}  // namespace quire
