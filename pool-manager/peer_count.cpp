#include "pool-manager/peer_count.h"

#include "base/log.h"

namespace gpupool::pool {

std::shared_ptr<void> PeerCount::take(const std::string& name) {
  Peer& peer = (*peers_)[name];
  if (peer.has >= most_) {
    if (!peer.told)
      GPUPOOL_WARNING("%s has %zu %s: no more are accepted until it has closed some", name.c_str(), peer.has,
                      what_.c_str());
    peer.told = true;
    return nullptr;
  }
  ++peer.has;
  return {&peer, [peers = peers_, name](void*) {
            const auto at = peers->find(name);
            if (--at->second.has == 0) peers->erase(at);
          }};
}

}  // namespace gpupool::pool
