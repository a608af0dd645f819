#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxkv {
namespace {

// Denormal numbers are zero and results round to nearest while it lives, as on the threads of XLA's pool.
class FloatState {
 public:
  FloatState() {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    _mm_setcsr((saved_ & ~0x6000u) | 0x8040u);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"((saved_ & ~(uint64_t(3) << 22)) | uint64_t(1) << 24));
#endif
  }
  ~FloatState() {
#if defined(__x86_64__)
    _mm_setcsr(saved_);
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" : : "r"(saved_));
#endif
  }
  FloatState(const FloatState&) = delete;
  FloatState& operator=(const FloatState&) = delete;

 private:
#if defined(__x86_64__)
  uint32_t saved_;
#elif defined(__aarch64__)
  uint64_t saved_;
#endif
};

void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Outlives the call: a helper that begins late finds no number left, and touches nothing else.
struct Work {
  const int64_t tasks;
  const std::function<void(int64_t)>* const run;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  Work(int64_t tasks, const std::function<void(int64_t)>* run) : tasks(tasks), run(run) {}

  void help() {
    int64_t mine = next.fetch_add(1);
    if (mine >= tasks) return;
    const FloatState state;
    int64_t finished = 0;
    for (; mine < tasks; mine = next.fetch_add(1)) {
      (*run)(mine);
      ++finished;
    }
    if (done.fetch_add(finished) + finished == tasks) {
      const std::lock_guard<std::mutex> lock(mutex);  // the caller is asleep, or looks at `done` before it sleeps
      all_done.notify_one();
    }
  }
};

constexpr int SPINS = 2000;  // some tens of microseconds: a task is short, and waking a thread costs more

}  // namespace

void parallel_for(Pool& pool, int64_t tasks, const std::function<void(int64_t)>& run) {
  if (tasks <= 0) return;
  const int64_t helpers = std::min(pool.threads(), tasks) - 1;
  if (helpers <= 0) {
    const FloatState state;
    for (int64_t i = 0; i < tasks; ++i) run(i);
    return;
  }
  const auto work = std::make_shared<Work>(tasks, &run);
  for (int64_t i = 0; i < helpers; ++i) pool.schedule([work] { work->help(); });
  work->help();
  for (int i = 0; i < SPINS && work->done.load() != tasks; ++i) pause_briefly();
  if (work->done.load() == tasks) return;
  std::unique_lock<std::mutex> lock(work->mutex);
  work->all_done.wait(lock, [&] { return work->done.load() == tasks; });
}

}  // namespace jaxkv
