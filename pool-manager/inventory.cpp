#include "pool-manager/inventory.h"

#include <algorithm>
#include <utility>

namespace gpupool::pool {

size_t Inventory::placeOf(const std::string& server) const {
  const auto at =
      std::lower_bound(servers_.begin(), servers_.end(), server,
                       [](const ServerUse& use, const std::string& name) { return use.name < name; });
  return static_cast<size_t>(at - servers_.begin());
}

const ServerUse* Inventory::find(const std::string& server) const {
  const size_t place = placeOf(server);
  return place == servers_.size() || servers_[place].name != server ? nullptr : &servers_[place];
}

void Inventory::refresh(const Make& make) {
  bool others = false;  // servers have come or gone
  for (const std::string& name : std::exchange(touched_, {})) {
    const size_t place = placeOf(name);
    const auto at = servers_.begin() + static_cast<std::ptrdiff_t>(place);
    const bool known = at != servers_.end() && at->name == name;
    std::optional<ServerUse> now = make(name);
    if (!now && !known) continue;
    if (now && known) {
      for (size_t i = 0; i < std::min(now->devices.size(), at->devices.size()); ++i)
        now->devices[i].claimedMs = at->devices[i].claimedMs;
      if (*now == *at) continue;
      *at = std::move(*now);
      if (!others) index_.update(servers_, place);
    } else {
      others = true;
      if (now)
        servers_.insert(at, std::move(*now));
      else
        servers_.erase(at);
    }
    ++version_;
  }
  if (others) index_.rebuild(servers_);
}

void Inventory::forgetClaims() {
  for (ServerUse& server : servers_)
    for (DeviceUse& device : server.devices) device.claimedMs = kNever;
}

}  // namespace gpupool::pool
