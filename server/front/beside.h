#pragma once
// Work that takes as long as a disk does, on a thread of its own, for the event loop's thread: that waits for
// nothing but its events. The thread ends by itself, perhaps behind everything else; what it uses must be its
// own. It gets no signals.

#include <kj/async.h>

#include <functional>
#include <memory>
#include <utility>

namespace gpupool::server {

// Starts the thread. Throws std::system_error if there is none to be had.
void startBeside(std::function<void()> work);

// The result of `work`, which throws std::exception with a text for people.
template <class T>
kj::Promise<T> beside(std::function<T()> work) {
  auto pair = kj::newPromiseAndCrossThreadFulfiller<T>();
  auto fulfiller = std::make_shared<decltype(pair.fulfiller)>(kj::mv(pair.fulfiller));
  startBeside([work = std::move(work), fulfiller] {
    try {
      (*fulfiller)->fulfill(work());
    } catch (const std::exception& error) {
      (*fulfiller)
          ->reject(kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__, kj::str(error.what())));
    }
  });
  return kj::mv(pair.promise);
}

}  // namespace gpupool::server
