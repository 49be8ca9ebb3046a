#pragma once
// How the manager's RPC asks the pool, and what it makes of its errors. Part of the service's implementation.

#include <ctime>
#include <exception>

#include "pool-manager/rpc.h"
#include "pool-manager/service.h"

namespace gpupool::pool {

// Turns the Pool's exceptions into RPC errors with nothing but their text.
template <class Body>
auto guarded(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const kj::Exception&) {
    throw;  // is a std::exception too, as it is thrown
  } catch (const std::exception& error) {
    kj::throwFatalException(rpcError(kj::Exception::Type::FAILED, error.what()));
  }
}

inline uint64_t calendarS() { return static_cast<uint64_t>(std::time(nullptr)); }  // since 1970

inline kj::Exception::Type typeOf(Failure::Kind kind) {
  switch (kind) {
    case Failure::Kind::noDevice:
      return kj::Exception::Type::OVERLOADED;
    case Failure::Kind::nothingFits:
      return kj::Exception::Type::UNIMPLEMENTED;
    case Failure::Kind::serverLost:
      return kj::Exception::Type::DISCONNECTED;
    case Failure::Kind::otherVersion:
    case Failure::Kind::refused:
      break;
  }
  return kj::Exception::Type::FAILED;
}

template <class T, class Body>
kj::Promise<T> Service::ask(Answers<T>& answers, const Id& id, Body&& body) {
  auto answer = answers.add(id);
  try {
    guarded([&] { body(clock_.now()); });
  } catch (...) {
    answers.dropLatest(id);
    throw;
  }
  return answer;
}

}  // namespace gpupool::pool
