// The threads all grids share. Whoever launches a grid works on it too, so a small grid never waits for a
// wake-up.
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

#include "server/softgpu/runtime/worker.h"

namespace gpupool::softgpu::runtime {
namespace {

struct Job {
  Grid* grid;
  unsigned wanted;  // helpers that may still join
  unsigned helping = 0;
};

// Lives as long as the process: its threads sleep in it, also while the process exits.
class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  void run(Grid& grid) {
    std::unique_ptr<Worker> worker = borrow();
    std::list<Job>::iterator job;
    uint64_t others = std::min<uint64_t>(grid.blocks - 1, coreCount() - 1);
    if (others > 0) {
      std::lock_guard lock(mutex_);
      startThreads();
      job = jobs_.insert(jobs_.end(), Job{&grid, static_cast<unsigned>(others)});
      for (uint64_t i = 0; i < others; ++i) wake_.notify_one();
    }
    worker->execute(grid);
    std::unique_lock lock(mutex_);
    if (others > 0) {
      job->wanted = 0;
      done_.wait(lock, [&] { return job->helping == 0; });  // ends: blocks of a grid end, or it fails
      jobs_.erase(job);
    }
    workers_.push_back(std::move(worker));
  }

 private:
  std::unique_ptr<Worker> borrow() {
    {
      std::lock_guard lock(mutex_);
      if (!workers_.empty()) {
        auto worker = std::move(workers_.back());
        workers_.pop_back();
        return worker;
      }
    }
    return std::make_unique<Worker>();
  }

  void startThreads() {
    for (; threads_ + 1 < coreCount(); ++threads_) std::thread([this] { serve(); }).detach();
  }

  void serve() {
    Worker worker;
    std::unique_lock lock(mutex_);
    while (true) {
      auto job = std::find_if(jobs_.begin(), jobs_.end(), [](const Job& one) { return one.wanted > 0; });
      if (job == jobs_.end()) {
        wake_.wait(lock);
        continue;
      }
      --job->wanted;
      ++job->helping;
      lock.unlock();
      worker.execute(*job->grid);
      lock.lock();
      if (--job->helping == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::list<Job> jobs_;
  std::vector<std::unique_ptr<Worker>> workers_;
  unsigned threads_ = 0;
};

}  // namespace

unsigned coreCount() {
  static const unsigned count = [] {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(1u, std::thread::hardware_concurrency());
    return std::max(1u, static_cast<unsigned>(CPU_COUNT(&set)));
  }();
  return count;
}

void runGrid(Grid& grid) { Pool::instance().run(grid); }

}  // namespace gpupool::softgpu::runtime
