#pragma once
// What the store says later of a write, as a promise for who has asked over RPC.

#include <kj/async.h>

#include <memory>

#include "pool-manager/journal.h"
#include "pool-manager/rpc.h"

namespace gpupool::pool {

class Stored {
 public:
  Stored() : Stored(kj::newPromiseAndFulfiller<void>()) {}
  Journal::Done done() const {
    return [fulfiller = fulfiller_](const std::string& why) {
      if (why.empty()) return (*fulfiller)->fulfill();
      (*fulfiller)->reject(rpcError(kj::Exception::Type::OVERLOADED, "not stored: " + why));
    };
  }
  kj::Promise<void> promise;

 private:
  explicit Stored(kj::PromiseFulfillerPair<void> pair)
      : promise(kj::mv(pair.promise)),
        fulfiller_(std::make_shared<kj::Own<kj::PromiseFulfiller<void>>>(kj::mv(pair.fulfiller))) {}
  // Shared, for a std::function is copied.
  std::shared_ptr<kj::Own<kj::PromiseFulfiller<void>>> fulfiller_;
};

}  // namespace gpupool::pool
