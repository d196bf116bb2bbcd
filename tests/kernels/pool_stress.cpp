// Short runs on a pool with as many and more workers than cores: what one piece writes another reads after the wait,
// and a run on all calls each worker once; some pieces take so long that who waits for them sleeps. Built with
// ThreadSanitizer, which reports what is not ordered. And how products are dealt: every tile of every panel once.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "gemm/gemm_partition.h"
#include "runtime/core_handover.h"
#include "runtime/pool.h"

namespace {

cpu_set_t cores_of(pid_t thread) {
  cpu_set_t set;
  sched_getaffinity(thread, sizeof(set), &set);
  return set;
}

constexpr int64_t kNumbers = 64;

const char* check_runs(int threads) {
  quire::Pool pool(threads, nullptr);
  std::vector<int64_t> written(kNumbers), copied(kNumbers);
  for (int64_t round = 0; round < 5000; ++round) {
    const auto linger = [round](const quire::Piece& piece) {
      const bool slow = round % 100 == 99 && piece.end == kNumbers;
      if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    pool.run([&](int worker) {
      quire::Piece piece;
      while (pool.first.take(worker, kNumbers, 5, &piece)) {
        linger(piece);
        for (int64_t at = piece.begin; at < piece.end; ++at) written[static_cast<size_t>(at)] = round + at;
        pool.first.finish(piece.end - piece.begin);
      }
      pool.first.wait(worker, kNumbers);
      while (pool.second.take(worker, kNumbers, 1, &piece)) {
        linger(piece);
        copied[static_cast<size_t>(piece.begin)] = written[static_cast<size_t>(kNumbers - 1 - piece.begin)];
      }
    });
    for (int64_t i = 0; i < kNumbers; ++i) {
      if (copied[static_cast<size_t>(i)] != round + kNumbers - 1 - i) return "a piece is missing";
    }
    if (round % 50 != 0) continue;
    std::vector<int> calls(static_cast<size_t>(threads));
    pool.run_on_all([&](int worker) { ++calls[static_cast<size_t>(worker)]; });
    for (const int number : calls) {
      if (number != 1) return "a worker was not called once";
    }
  }
  return nullptr;
}

const char* check_partition(int64_t panels, int64_t tiles, int64_t workers) {
  constexpr int64_t kLeastTiles = 8;
  const quire::Partition partition(panels, tiles, kLeastTiles, workers);
  std::vector<int> dealt(static_cast<size_t>(panels * tiles));
  for (int64_t at = 0; at < partition.pieces(); ++at) {
    if (partition.first_tile(at) >= partition.end_tile(at)) return "a piece has no tiles";
    for (int64_t t = partition.first_tile(at); t < partition.end_tile(at); ++t) {
      ++dealt[static_cast<size_t>(partition.panel(at) * tiles + t)];
    }
  }
  for (const int times : dealt) {
    if (times != 1) return "a tile is not dealt once";
  }
  if (workers == 1) return partition.pieces() == panels ? nullptr : "one worker reads panels more often than once";
  if (panels >= 4 * workers && partition.pieces() != panels) return "panels are cut that are many";
  if (partition.pieces() < std::min(workers, panels * tiles)) return "a worker has nothing";
  if (tiles >= 4 * kLeastTiles && panels >= workers && partition.pieces() < 4 * workers)
    return "the pieces are too large";
  if (tiles < 2 * kLeastTiles && panels >= workers && partition.pieces() != panels) return "the pieces are too small";
  return nullptr;
}

// A thread that sleeps while it is said to compute has no core, as one that another process keeps off its own.
const char* check_handover() {
  const cpu_set_t all = cores_of(0);
  quire::CoreHandover handover(2, nullptr);
  if (handover.moves() != (CPU_COUNT(&all) >= 2)) return "threads are moved where there are fewer cores, or never";
  if (!handover.moves()) return nullptr;
  if (quire::CoreHandover(CPU_COUNT(&all) + 1, nullptr).moves()) return "more threads than cores are moved";
  const char* wrong = nullptr;
  std::atomic<int> stage{0};
  cpu_set_t home;
  std::thread worker([&] {
    handover.join(1);
    stage = 1;
    while (stage != 2) std::this_thread::yield();
    handover.begin(1);
    stage = 3;
    while (stage != 4) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    handover.end(1);
    handover.give_back(1);
    home = cores_of(0);
  });
  while (stage != 1) std::this_thread::yield();
  handover.begin();
  handover.end(0);
  if (handover.hand_over()) wrong = "a core is lent to nobody";
  stage = 2;
  while (stage != 3) std::this_thread::yield();
  bool lent = false;  // it may be awake at the first looks
  for (int looks = 0; looks < 1000 && !lent; ++looks) lent = handover.hand_over();
  if (!lent) wrong = "a thread without a core is not lent one";
  stage = 4;
  worker.join();
  if (CPU_COUNT(&home) != CPU_COUNT(&all) - 1) wrong = "a worker that borrowed a core does not keep off the caller's";
  const cpu_set_t after = cores_of(0);
  if (!CPU_EQUAL(&all, &after)) wrong = "the caller's cores are not what they were";
  return wrong;
}

const char* check_all() {
  if (const char* wrong = check_handover()) return wrong;
  for (const int threads : {1, 2, 3, 9}) {
    if (const char* wrong = check_runs(threads)) return wrong;
  }
  for (const int64_t workers : {1, 2, 3, 16, 64}) {
    for (const int64_t panels : {1, 3, 4, 16, 96, 300}) {
      for (int64_t tiles = 1; tiles < 100; ++tiles) {
        if (const char* wrong = check_partition(panels, tiles, workers)) return wrong;
      }
    }
  }
  return nullptr;
}

}  // namespace

int main() {
  const char* wrong = check_all();
  std::puts(wrong == nullptr ? "done" : wrong);
  return wrong == nullptr ? 0 : 1;
}
