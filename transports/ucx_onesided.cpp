// Large transfers over RDMA: the worker's network card reads and writes the client's memory, no processor
// copies. Only the worker starts such transfers and only the client's memory has keys, so a client never
// reaches the server's memory by itself:
//
//   client puts   fetch (where its bytes are)    -> the worker gets them, answers putDone
//   client gets   fill (where they are to go)    -> the worker puts them, answers filled
//   worker puts   into a region the client announced with a key; says placed when it is there
//   worker gets   from such a region
//
// Memory that the client shares is registered then, and stays until the worker has said that it lets go of it
// (withdrawn); other memory for the time of a transfer. What is small, or cannot be registered, goes as
// messages.

#include <cstring>

#include "transports/ucx.h"

namespace gpupool::transport {

namespace {

// From here on TCP goes by rendezvous, and RDMA without copies.
constexpr size_t kBulkBytes = 32 << 10;

// Where memory of the client is, as it says: an address and, behind it, UCX's key.
struct PeerMemory {
  uint64_t address = 0;
  std::span<const std::byte> key;
};

PeerMemory parsePeerMemory(const void* data, size_t length) {
  PeerMemory memory;
  if (length < sizeof memory.address) return memory;
  std::memcpy(&memory.address, data, sizeof memory.address);
  memory.key = {static_cast<const std::byte*>(data) + sizeof memory.address, length - sizeof memory.address};
  return memory;
}

}  // namespace

// --- any thread ---

bool Ucx::oneSided(size_t bytes) const { return registered_ && !isWorker_ && bytes >= kBulkBytes; }

void Ucx::registerShared(Region region, const std::shared_ptr<SharedMemory>& memory, Request& announcement) {
  auto registration = registered_->map(memory->data(), memory->size(), !isWorker_);
  if (!registration) return;
  registered_->publish(registration);
  if (!isWorker_) announcement.registered = registration;
  std::lock_guard lock(sharedMutex_);
  shared_[{region.id, region.generation}] = {memory, registration};
}

// A client's stays mapped until the worker, which may be in the middle of a transfer, lets go of it
// (onWithdrawn).
void Ucx::forgetShared(Region region) {
  Shared gone;  // unmapped outside the lock
  std::lock_guard lock(sharedMutex_);
  auto found = shared_.find({region.id, region.generation});
  if (found == shared_.end()) return;
  registered_->withdraw(*found->second.registered);
  found->second.withdrawn = true;
  if (!isWorker_ && !sharingEnded_) return;
  gone = std::move(found->second);
  shared_.erase(found);
}

// Makes `request` one that the worker carries out, with the place of `local` in it. False: by messages, then.
bool Ucx::pointTo(Request& request, WireKind kind, const void* local) {
  size_t bytes = request.header.length;
  auto registration = registered_->find(local, bytes);
  if (!registration) registration = registered_->map(local, bytes, true);
  if (!registration || registration->key().empty()) return false;
  request.registered = std::move(registration);
  request.header.kind = kind;
  return true;
}

// --- progress thread ---

uint32_t Ucx::bulkFlags(size_t bytes) const {
  return bytes >= kBulkBytes && !registered_ ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
}

// What can name memory of this side takes the place along.
void Ucx::sendWithPlace(const Request& request, UcxLink::Done done) {
  if (!request.registered) {
    link_->send(request.header, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, std::move(done));
    return;
  }
  const Registration& registered = *request.registered;
  const void* local = request.header.kind == WireKind::fetch  ? request.source
                      : request.header.kind == WireKind::fill ? request.target
                                                              : registered.data();
  auto address = reinterpret_cast<uint64_t>(local);
  auto place = std::make_shared<std::vector<std::byte>>(sizeof address + registered.key().size());
  std::memcpy(place->data(), &address, sizeof address);
  std::memcpy(place->data() + sizeof address, registered.key().data(), registered.key().size());
  link_->send(request.header, place->data(), place->size(), UCP_AM_SEND_FLAG_EAGER,
              [place, done = std::move(done)](bool ok) {
                if (done) done(ok);
              });
}

bool Ucx::receivedOneSided(const WireHeader& header, const void* data, size_t length) {
  if (!registered_) return false;
  bool forWorker = header.kind == WireKind::fetch || header.kind == WireKind::fill;
  if (forWorker != isWorker_) return false;
  switch (header.kind) {
    case WireKind::fetch:
      onFetch(header, data, length);
      return true;
    case WireKind::fill:
      onFill(header, data, length);
      return true;
    case WireKind::filled:
      onFilled(header);
      return true;
    case WireKind::placed:
      onPlaced(header);
      return true;
    default:
      onWithdrawn(header.region);
      return true;
  }
}

// --- the worker: what the client asks for ---

void Ucx::onFetch(const WireHeader& header, const void* data, size_t length) {
  if (header.number <= putsLanded_ || header.number - putsLanded_ > kMaxServing)
    return lose("the peer numbered its puts wrongly");
  PeerMemory source = parsePeerMemory(data, length);
  auto memory = local_.find(header.region);
  std::shared_ptr<ucp_rkey> key = link_->unpackKey(source.key);
  if (!memory || !key || !within(memory->size(), header.offset, header.length))
    return landed(header.number, false);
  std::byte* target = memory->data() + header.offset;
  auto registered = registered_->find(target, header.length);
  // Memory and key stay until UCX is done with them, whatever becomes of their names.
  link_->get(target, header.length, source.address, key.get(), registered.get(),
             [this, memory, key, registered, number = header.number, bytes = header.length](bool ok) {
               if (ok) moved_ += bytes;
               landed(number, ok);
             });
}

void Ucx::onFill(const WireHeader& header, const void* data, size_t length) {
  PeerMemory target = parsePeerMemory(data, length);
  auto memory = local_.find(header.region);
  std::shared_ptr<ucp_rkey> key = link_->unpackKey(target.key);
  WireHeader answer{.kind = WireKind::filled, .number = header.number};
  if (!memory || !key || !within(memory->size(), header.offset, header.length)) {
    answer.channel = 1;
    link_->send(answer, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
    return;
  }
  if (++serving_ > kMaxServing) return lose("the peer asked for too much at once");
  const std::byte* source = memory->data() + header.offset;
  auto registered = registered_->find(source, header.length);
  link_->put(source, header.length, target.address, key.get(), registered.get(),
             [this, memory, key, registered, answer, bytes = header.length](bool ok) mutable {
               --serving_;
               if (peer() != Peer::alive) return;
               if (ok) moved_ += bytes;
               answer.channel = ok ? 0 : 1;
               link_->send(answer, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
             });
}

// --- the worker: the client's regions ---

void Ucx::onPeerRegion(const WireHeader& header, const void* data, size_t length) {
  if (!remote_->announce(header.region, header.length, {}, nullptr))
    return lose("the peer announced a broken region");
  if (!registered_ || !isWorker_) return;
  PeerMemory place = parsePeerMemory(data, length);
  (*peerRegions_)[{header.region.id, header.region.generation}] = {place.address,
                                                                   link_->unpackKey(place.key)};
}

// With a key, and not withdrawn.
Ucx::PeerRegion* Ucx::peerRegion(Region region) {
  auto found = peerRegions_->find({region.id, region.generation});
  bool usable = found != peerRegions_->end() && !found->second.withdrawn && found->second.key;
  return usable ? &found->second : nullptr;
}

void Ucx::withdrawPeerRegion(Region region) {
  auto found = peerRegions_->find({region.id, region.generation});
  if (found == peerRegions_->end()) return;
  found->second.withdrawn = true;
  letGo(region);
}

void Ucx::finishedIn(Region region) {
  auto found = peerRegions_->find({region.id, region.generation});
  if (found == peerRegions_->end()) return;
  --found->second.busy;
  letGo(region);
}

// Tells the client that a region it withdrew is free, once nothing is under way there.
void Ucx::letGo(Region region) {
  auto found = peerRegions_->find({region.id, region.generation});
  if (!found->second.withdrawn || found->second.busy != 0) return;
  peerRegions_->erase(found);
  link_->send({.kind = WireKind::withdrawn, .region = region}, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
}

// False: not into this region, or not worth it; by messages, then.
bool Ucx::placeDirectly(const Request& request) {
  const WireHeader& header = request.header;
  if (!registered_ || !isWorker_ || header.length < kBulkBytes) return false;
  PeerRegion* region = peerRegion(header.region);
  if (!region) return false;
  ++region->busy;
  auto registered = registered_->find(request.source, header.length);
  link_->put(request.source, header.length, region->address + header.offset, region->key.get(),
             registered.get(), [this, header, key = region->key, registered](bool ok) {
               PutState& put = puts_[header.number];
               put.sent = put.answered = true;
               put.ok &= ok;
               if (ok) moved_ += header.length;
               settle(header.number);
               if (peer() != Peer::alive) return;
               WireHeader placed{.kind = WireKind::placed,
                                 .channel = ok ? 0u : 1u,
                                 .number = header.number,
                                 .length = header.length};
               link_->send(placed, nullptr, 0, UCP_AM_SEND_FLAG_EAGER, {});
               finishedIn(header.region);
             });
  return true;
}

bool Ucx::getDirectly(const Request& request) {
  const WireHeader& header = request.header;
  if (!registered_ || !isWorker_ || header.length < kBulkBytes) return false;
  PeerRegion* region = peerRegion(header.region);
  if (!region) return false;
  ++region->busy;
  auto registered = registered_->find(request.target, header.length);
  link_->get(request.target, header.length, region->address + header.offset, region->key.get(),
             registered.get(),
             [this, header, key = region->key, registered, transfer = request.transfer](bool ok) {
               if (ok) moved_ += header.length;
               transfers_->end(transfer, ok);
               if (peer() == Peer::alive) finishedIn(header.region);
             });
  return true;
}

// --- the client: what the worker did ---

void Ucx::onFilled(const WireHeader& header) {
  auto found = gets_.find(header.number);
  if (found == gets_.end() || found->second.header.kind != WireKind::fill)
    return lose("the peer answered a get that was never sent");
  Request request = std::move(found->second);
  gets_.erase(found);
  if (header.channel == 0) moved_ += request.header.length;
  request.registered.reset();  // whoever waits may free the memory
  transfers_->end(request.transfer, header.channel == 0);
}

void Ucx::onPlaced(const WireHeader& header) {
  if (header.number <= putsLanded_ || header.number - putsLanded_ > kMaxServing ||
      landedEarly_.count(header.number) != 0)
    return lose("the peer numbered its puts wrongly");
  if (header.channel == 0) moved_ += header.length;
  markLanded(header.number);
}

void Ucx::onWithdrawn(Region region) {
  Shared gone;  // unmapped outside the lock
  std::lock_guard lock(sharedMutex_);
  auto found = shared_.find({region.id, region.generation});
  if (found == shared_.end() || !found->second.withdrawn) return;
  gone = std::move(found->second);
  shared_.erase(found);
}

}  // namespace gpupool::transport
