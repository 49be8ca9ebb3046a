#pragma once
// The lock under which calls are sent whose order counts (client/streams.h, lockWords). Its thread gives it
// up while it awaits a reply: what it has sent has its place by then, and others may send behind it.
//
// A call awaits its reply where otherwise it would not while a stream is captured (Session::forceAwait). If
// the worker dies then, the reply comes from the next one, and before there is one every thread that is
// inside a transfer (client/transfers.h) has to leave, which may need this lock.
//
// Behind a call that may be awaited, what the mutex protects may have changed.
// Threads: any. There is one such lock in a process, and a thread takes it once.

#include <mutex>

namespace gpupool::client {

class OrderLock {
 public:
  OrderLock();
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
    bool lent_;
  };

  static std::mutex& mutex();  // what it locks; for tests
};

}  // namespace gpupool::client
