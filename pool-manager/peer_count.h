#pragma once
// Counts what each peer has of something, up to a limit. One thread.

#include <map>
#include <memory>
#include <string>

namespace gpupool::pool {

class PeerCount {
 public:
  // what: of what, in the log. most: of each peer.
  PeerCount(std::string what, size_t most) : what_(std::move(what)), most_(most) {}

  // One more, until the pointer is released, which may be after the end of this object. Null: it has as many
  // as it may; logged when it is refused the first time since it had none.
  std::shared_ptr<void> take(const std::string& peer);

 private:
  struct Peer {
    size_t has = 0;
    bool told = false;
  };
  using Peers = std::map<std::string, Peer>;

  std::string what_;
  size_t most_;
  std::shared_ptr<Peers> peers_ = std::make_shared<Peers>();
};

}  // namespace gpupool::pool
