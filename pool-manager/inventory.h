#pragma once
// The pool's servers and devices as placement sees them, kept from one question to the next. What changes is
// named (touch), and made anew before the next question (refresh); nothing else is looked at. One thread.

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pool-manager/placement_index.h"

namespace gpupool::pool {

class Inventory {
 public:
  // The server as it is now; none: it is not there.
  using Make = std::function<std::optional<ServerUse>(const std::string& server)>;

  // Something of that server has changed, or it has come or gone.
  void touch(const std::string& server) { touched_.insert(server); }
  // Claims (DeviceUse::claimedMs) stay.
  void refresh(const Make& make);

  // By name. To be changed are only their claims.
  std::vector<ServerUse>& servers() { return servers_; }
  const std::vector<ServerUse>& servers() const { return servers_; }
  const PlacementIndex& index() const { return index_; }
  const ServerUse* find(const std::string& server) const;
  void forgetClaims();
  // Grows when refresh() finds that something is not what it was.
  uint64_t version() const { return version_; }

 private:
  size_t placeOf(const std::string& server) const;  // where it is, or would be

  std::set<std::string> touched_;
  std::vector<ServerUse> servers_;
  PlacementIndex index_;
  uint64_t version_ = 1;
};

}  // namespace gpupool::pool
