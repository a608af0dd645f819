// A pool of threads for drivers that run kernels without XLA.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "threads.h"

class OwnPool final : public jaxkv::Pool {
 public:
  // `threads` besides the caller's.
  explicit OwnPool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~OwnPool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t threads() override { return int64_t(threads_.size()) + 1; }
  void schedule(std::function<void()> function) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(function));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> function;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return over_ || !waiting_.empty(); });
        if (waiting_.empty()) return;
        function = std::move(waiting_.front());
        waiting_.pop_front();
      }
      function();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> waiting_;
  std::vector<std::thread> threads_;
  bool over_ = false;
};
