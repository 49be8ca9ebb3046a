#pragma once
// Handlers (routes.h) of leases that are asked for over REST, of the queue, and of what is about requests.
//
// A lease over REST is a claim (pool-manager/claims.h) that no job scheduler has made: whoever asks has no
// holder, and programs use it by GPUPOOL_CLAIM. The job's name comes from the request's Idempotency-Key, so
// that the same key is the same lease, also after the manager was started again.

#include <kj/async.h>

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "pool-manager/peer_count.h"
#include "pool-manager/rest/exchange.h"
#include "schema/id.h"

namespace gpupool::pool::rest {

struct Context;

// Orders that go on when their request has been answered. One thread.
class Orders final : private kj::TaskSet::ErrorHandler {
 public:
  Orders() : tasks_(*this) {}
  ~Orders() noexcept {}  // which a TaskSet's is not

  // peer: who has asked; place() of it lasts until the order is done.
  void goOn(kj::Promise<void>&& order) { tasks_.add(kj::mv(order)); }
  // Null: its peer has as many as it may.
  std::shared_ptr<void> place(const std::string& peer) { return places_.take(peer); }
  // Why a request that was answered before its end has got no lease; null: none is known that has not. The
  // latest are kept.
  const Problem* unserved(const Id& id) const;
  void noteUnserved(const Id& id, Problem problem);
  void forget(const Id& id);

 private:
  void taskFailed(kj::Exception&& error) override;

  PeerCount places_{"orders over REST that go on", 64};
  std::map<Id, Problem> unserved_;
  std::deque<Id> noted_;
  kj::TaskSet tasks_;
};

kj::Promise<Answer> createLease(const Context& context, const Request& request);
kj::Promise<Answer> renewLease(const Context& context, const Request& request);
kj::Promise<Answer> listQueue(const Context& context, const Request& request);
kj::Promise<Answer> explainRequest(const Context& context, const Request& request);
kj::Promise<Answer> listAudit(const Context& context, const Request& request);

// Of a lease that waits for its devices, as it is listed; none: it does not.
std::optional<Json> queued(const Context& context, const Request& request, const Id& id);

}  // namespace gpupool::pool::rest
