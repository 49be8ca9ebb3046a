#pragma once
// The leases of a pool by id, which of them are on which server, and which are whose. Whoever takes a record
// to change it marks it: before the next question the table looks again at where it is placed, and its
// servers are told to have changed (takeTouched). So what is kept of a server is made anew only when a lease
// there may have changed. One thread; what on() and of() return is valid until the table is changed.
//
// Record: has id, tenant, placements (records.h) and `touched`, which is the table's own.

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool-manager/records.h"

namespace gpupool::pool {

template <class Record>
class LeaseTable {
 public:
  using Records = std::map<Id, Record>;
  using iterator = typename Records::iterator;
  using const_iterator = typename Records::const_iterator;

  const Records& all() const { return records_; }
  const_iterator begin() const { return records_.begin(); }
  const_iterator end() const { return records_.end(); }
  const_iterator find(const Id& id) const { return records_.find(id); }
  bool contains(const Id& id) const { return records_.contains(id); }
  bool empty() const { return records_.empty(); }
  size_t size() const { return records_.size(); }

  // To change them: marked. All of them, for a loop: seldom.
  iterator begin() {
    for (auto& [id, record] : records_) mark(id, record);
    return records_.begin();
  }
  iterator end() { return records_.end(); }
  iterator find(const Id& id) {
    const auto at = records_.find(id);
    if (at != records_.end()) mark(id, at->second);
    return at;
  }
  Record& at(const Id& id) {
    Record& record = records_.at(id);
    mark(id, record);
    return record;
  }
  Record& operator[](const Id& id) {
    Record& record = records_[id];
    mark(id, record);
    return record;
  }
  void touch(Record& record) { mark(record.id, record); }
  void erase(iterator at) {
    forget(at->first);
    records_.erase(at);
  }
  // To change what no inventory shows (deadlines, what is told to people): not marked.
  Records& quietly() { return records_; }

  // The leases that have a placement on that server.
  const std::set<Id>& on(const std::string& server) const { return listed(on_, server); }
  // That tenant's.
  const std::set<Id>& of(const std::string& tenant) const { return listed(of_, tenant); }
  // Whether a lease has this device on another server than that one.
  bool hasElsewhere(const std::string& uuid, const std::string& server) const {
    lookAgain();
    const auto at = serversOf_.find(uuid);
    return at != serversOf_.end() && (at->second.size() > 1 || at->second.begin()->first != server);
  }
  // The leases on other servers than that one that have this device.
  std::set<Id> elsewhere(const std::string& uuid, const std::string& server) const {
    lookAgain();
    std::set<Id> found;
    const auto at = serversOf_.find(uuid);
    if (at == serversOf_.end()) return found;
    for (const auto& [name, count] : at->second)
      if (name != server) found.insert(on_.at(name).begin(), on_.at(name).end());
    return found;
  }
  // The servers on which a lease may have changed since the last call.
  std::set<std::string> takeTouched() {
    lookAgain();
    return std::exchange(touched_, {});
  }

 private:
  using Lists = std::unordered_map<std::string, std::set<Id>>;
  struct Place {
    std::string server;
    std::vector<std::string> uuids;
    bool is(const Placement& placement) const {
      return server == placement.server.name &&
             std::equal(
                 uuids.begin(), uuids.end(), placement.devices.begin(), placement.devices.end(),
                 [](const std::string& uuid, const LeasedDevice& one) { return uuid == one.info.uuid; });
    }
  };

  // Of a lease when it was looked at last.
  struct Seen {
    std::string tenant;
    std::vector<Place> places;
  };

  const std::set<Id>& listed(const Lists& lists, const std::string& name) const {
    static const std::set<Id> none;
    lookAgain();
    const auto at = lists.find(name);
    return at == lists.end() ? none : at->second;
  }
  static void strike(Lists& lists, const std::string& name, const Id& id) {
    const auto at = lists.find(name);
    if (at == lists.end()) return;
    at->second.erase(id);
    if (at->second.empty()) lists.erase(at);
  }

  void mark(const Id& id, Record& record) {
    if (std::exchange(record.touched, true)) return;
    marked_.push_back(id);
  }

  void lookAgain() const {
    for (const Id& id : std::exchange(marked_, {})) {
      const auto at = records_.find(id);
      if (at == records_.end()) continue;
      at->second.touched = false;
      const auto& placements = at->second.placements;
      const auto seen = seen_.find(id);
      const bool same =
          seen != seen_.end() && seen->second.tenant == at->second.tenant &&
          std::equal(seen->second.places.begin(), seen->second.places.end(), placements.begin(),
                     placements.end(), [](const Place& a, const Placement& b) { return a.is(b); });
      if (!same) {
        forget(id);
        note(at->second);
      }
      for (const Placement& one : placements) touched_.insert(one.server.name);
    }
  }

  void note(const Record& record) const {
    Seen& seen = seen_[record.id];
    seen.tenant = record.tenant;
    of_[record.tenant].insert(record.id);
    for (const Placement& placement : record.placements) {
      Place& place = seen.places.emplace_back(Place{placement.server.name, {}});
      for (const LeasedDevice& one : placement.devices) {
        place.uuids.push_back(one.info.uuid);
        ++serversOf_[one.info.uuid][place.server];
      }
      on_[place.server].insert(record.id);
    }
  }

  void forget(const Id& id) const {
    const auto seen = seen_.find(id);
    if (seen == seen_.end()) return;
    strike(of_, seen->second.tenant, id);
    for (const Place& place : seen->second.places) {
      touched_.insert(place.server);
      strike(on_, place.server, id);
      for (const std::string& uuid : place.uuids) {
        const auto servers = serversOf_.find(uuid);
        const auto count = servers->second.find(place.server);
        if (--count->second == 0) servers->second.erase(count);
        if (servers->second.empty()) serversOf_.erase(servers);
      }
    }
    seen_.erase(seen);
  }

  mutable Records records_;  // mutable: for the marks
  mutable std::vector<Id> marked_;
  mutable std::map<Id, Seen> seen_;
  mutable Lists on_, of_;  // by server, by tenant
  mutable std::unordered_map<std::string, std::map<std::string, unsigned>> serversOf_;  // by UUID
  mutable std::set<std::string> touched_;
};

}  // namespace gpupool::pool
