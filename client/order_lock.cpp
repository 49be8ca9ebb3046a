#include "client/order_lock.h"

#include <pthread.h>

#include <atomic>

namespace gpupool::client {
namespace {

// Of the one order that there is. Only the thread that has the lock finds itself there.
std::atomic<OrderLock*> held{nullptr};
std::atomic<pthread_t> owner{};

}  // namespace

OrderLock::OrderLock(std::mutex& mutex) : mutex_(mutex) {
  mutex_.lock();
  held = this;
  owner = ::pthread_self();
}

OrderLock::~OrderLock() {
  owner = pthread_t{};
  mutex_.unlock();
}

OrderLock::Lent::Lent() : lock_(owner == ::pthread_self() ? held.load() : nullptr) {
  if (lock_ == nullptr) return;
  owner = pthread_t{};
  lock_->mutex_.unlock();
}

OrderLock::Lent::~Lent() {
  if (lock_ == nullptr) return;
  lock_->mutex_.lock();
  held = lock_;
  owner = ::pthread_self();
}

}  // namespace gpupool::client
