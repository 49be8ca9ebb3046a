#include "client/order_lock.h"

#include <pthread.h>

#include <atomic>

namespace gpupool::client {
namespace {

// Who has the lock; 0: nobody. A thread asks only whether that is itself, which it alone writes: no order
// with other memory is needed.
std::atomic<pthread_t> owner{};

void take() {
  OrderLock::mutex().lock();
  owner.store(::pthread_self(), std::memory_order_relaxed);
}

void giveUp() {
  owner.store({}, std::memory_order_relaxed);
  OrderLock::mutex().unlock();
}

}  // namespace

std::mutex& OrderLock::mutex() {
  static std::mutex one;
  return one;
}

OrderLock::OrderLock() { take(); }
OrderLock::~OrderLock() { giveUp(); }

OrderLock::Lent::Lent() : lent_(owner.load(std::memory_order_relaxed) == ::pthread_self()) {
  if (lent_) giveUp();
}

OrderLock::Lent::~Lent() {
  if (lent_) take();
}

}  // namespace gpupool::client
