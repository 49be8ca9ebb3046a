#pragma once
// Orders for leases: those for one lease are carried out one after the other, also when nobody waits for the
// answer any more: a manager that goes away meanwhile must not leave a lease half way. Belongs to the event
// loop's thread.

#include <kj/async-io.h>

#include <map>

#include "schema/id.h"

namespace gpupool::server {

class LeaseLanes {
 public:
  explicit LeaseLanes(kj::TaskSet::ErrorHandler& errors) : tasks_(errors) {}
  KJ_DISALLOW_COPY(LeaseLanes);

  // Carries `work` out when the lease's earlier orders are done.
  template <class Result>
  kj::Promise<Result> queue(const Id& lease, kj::Function<kj::Promise<Result>()> work) {
    auto& lane = lanes_[lease];
    if (lane.get() == nullptr) {
      lane = kj::heap<Lane>();
      lane->last = kj::Promise<void>(kj::READY_NOW).fork();
    }
    auto result = lane->last.addBranch().then(kj::mv(work)).fork();
    lane->last = result.addBranch().then([](auto&&...) {}, [](kj::Exception&&) {}).fork();
    ++lane->orders;
    tasks_.add(lane->last.addBranch().then([this, lease] {
      const auto found = lanes_.find(lease);
      if (--found->second->orders == 0) lanes_.erase(found);
    }));
    return result.addBranch();
  }

 private:
  struct Lane {
    kj::ForkedPromise<void> last = nullptr;
    size_t orders = 0;  // not done
  };
  std::map<Id, kj::Own<Lane>> lanes_;  // of leases with orders that are not done
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
