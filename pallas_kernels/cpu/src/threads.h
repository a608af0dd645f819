// Tasks on a pool of threads that others use, too. The caller works along, and waits for nothing but tasks that have begun: a pool all
// of whose threads are callers themselves (several CPU devices on one thread) cannot stop it.
#pragma once

#include <cstdint>
#include <functional>

namespace jaxkv {

// XLA's pool in the library, threads of their own in the stand-alone driver.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int64_t threads() = 0;
  // Runs the function some time later, perhaps never within the caller's life, perhaps at once.
  virtual void schedule(std::function<void()> function) = 0;
};

// Runs run(0) .. run(tasks - 1) in any order and returns when all are done. Numbers are claimed one at a time, so tasks need not cost the
// same. `run` throws nothing. While it runs, denormal numbers count as zero in every thread, so that no bit depends on who ran a task.
void parallel_for(Pool& pool, int64_t tasks, const std::function<void(int64_t)>& run);

}  // namespace jaxkv
