#pragma once
// A lock for calls that are to be sent in an order, which its thread gives up while it awaits a reply: what
// it has sent has its place by then, and others may send behind it.
//
// A call awaits its reply where otherwise it would not while a stream is captured (Session::forceAwait). If
// the worker dies then, the reply comes from the next one, and before there is one every thread that is
// inside a transfer (client/transfers.h) has to leave, which may need this lock.
//
// Behind a call that may be awaited, what the mutex protects may have changed.
// Threads: any. A process has one such mutex.

#include <mutex>

namespace gpupool::client {

class OrderLock {
 public:
  explicit OrderLock(std::mutex& mutex);
  ~OrderLock();
  OrderLock(const OrderLock&) = delete;
  OrderLock& operator=(const OrderLock&) = delete;

  // While it lives, this thread's lock, if it has one, is given up. No other lock is held at its ends.
  class Lent {
   public:
    Lent();
    ~Lent();
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

   private:
    OrderLock* lock_;
  };

 private:
  std::mutex& mutex_;
};

}  // namespace gpupool::client
