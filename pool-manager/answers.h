#pragma once
// Who waits for the answer to something that the pool does with a lease: several calls may wait for the same.
// One thread.

#include <kj/async.h>

#include <map>
#include <vector>

#include "schema/id.h"

namespace gpupool::pool {

template <class T>
class Answers {
 public:
  kj::Promise<T> add(const Id& id) {
    auto answer = kj::newPromiseAndFulfiller<T>();
    waiting_[id].push_back(kj::mv(answer.fulfiller));
    return kj::mv(answer.promise);
  }
  // The latest one that was added is answered otherwise.
  void dropLatest(const Id& id) {
    const auto at = waiting_.find(id);
    if (at == waiting_.end()) return;
    at->second.pop_back();
    if (at->second.empty()) waiting_.erase(at);
  }
  // value: a copy for each; none where T is void.
  template <class... Value>
  void fulfill(const Id& id, const Value&... value) {
    auto node = waiting_.extract(id);
    if (node.empty()) return;
    for (auto& waiter : node.mapped()) waiter->fulfill(Value(value)...);
  }
  void reject(const Id& id, const kj::Exception& error) {
    auto node = waiting_.extract(id);
    if (node.empty()) return;
    for (auto& waiter : node.mapped()) waiter->reject(kj::cp(error));
  }
  // False: nobody waits any more; those who did have gone away.
  bool wanted(const Id& id) {
    const auto at = waiting_.find(id);
    if (at == waiting_.end()) return false;
    for (auto& waiter : at->second)
      if (waiter->isWaiting()) return true;
    waiting_.erase(at);
    return false;
  }

 private:
  std::map<Id, std::vector<kj::Own<kj::PromiseFulfiller<T>>>> waiting_;
};

}  // namespace gpupool::pool
