#include "client/order_lock.h"

#include <utility>

namespace gpupool::client {
namespace {

thread_local OrderLock* held __attribute__((tls_model("initial-exec"))) = nullptr;

}  // namespace

OrderLock::OrderLock(std::mutex& mutex) : mutex_(mutex) {
  mutex_.lock();
  held = this;
}

OrderLock::~OrderLock() {
  held = nullptr;
  mutex_.unlock();
}

OrderLock::Lent::Lent() : lock_(std::exchange(held, nullptr)) {
  if (lock_ != nullptr) lock_->mutex_.unlock();
}

OrderLock::Lent::~Lent() {
  if (lock_ == nullptr) return;
  lock_->mutex_.lock();
  held = lock_;
}

}  // namespace gpupool::client
