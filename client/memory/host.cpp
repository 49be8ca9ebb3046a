// The arena: pieces, blocks, and what a move of the session does with them.
#include "client/memory/host.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/log.h"
#include "client/memory/pages.h"
#include "client/session.h"
#include "transports/descriptor.h"

namespace gpupool::client {
namespace {

constexpr size_t kBlock = 256;
constexpr std::chrono::seconds kLettingGo{2};  // later it is unmapped with the next call
transport::Deadline bound() { return transport::Clock::now() + std::chrono::seconds(30); }

}  // namespace

HostMemory& hostMemory() {
  static auto* memory = new HostMemory;
  return *memory;
}

// ---- the arena ----

// Addresses for a piece. Under growing_.
bool HostMemory::takeAddress(size_t bytes, uint64_t& address) {
  const schema::AddressSpace& space = Session::get().space();
  if (nextAddress_ == 0) nextAddress_ = space.hostBase;
  unmapParked();
  auto again = freeAddresses_.find(bytes);
  if (again != freeAddresses_.end()) {
    address = again->second;
    freeAddresses_.erase(again);
    return true;
  }
  const auto takeUnits = [&](size_t wanted, uint64_t& at) {
    if (wanted > space.hostBase + space.hostBytes - nextAddress_) return false;
    at = nextAddress_;
    nextAddress_ += roundUp(wanted, kSharedPiece);
    return true;
  };
  // On a network small pieces are mirrors: side by side, so that the kernel is asked for many at once.
  if (bytes > kSharedPiece / 4 || Session::get().mapsMemory()) return takeUnits(bytes, address);
  if (smallEnd_ - smallNext_ < roundUp(bytes, kPage)) {
    if (!takeUnits(kSharedPiece, smallNext_)) return false;
    smallEnd_ = smallNext_ + kSharedPiece;
  }
  address = smallNext_;
  smallNext_ += roundUp(bytes, kPage);
  return true;
}

CUresult HostMemory::addPiece(CUcontext context, size_t bytes, unsigned flags, PieceAt& made) {
  Session& session = Session::get();
  uint64_t address = 0;
  if (!takeAddress(bytes, address)) return CUDA_ERROR_OUT_OF_MEMORY;
  schema::RegionName name;
  CUresult status = session.await<"sessionHostMap">(context, CUdeviceptr{address}, bytes, flags, &name);
  if (status != CUDA_SUCCESS) {
    freeAddresses_.emplace(bytes, address);
    return status;
  }
  Piece piece;
  piece.context = context;
  piece.bytes = bytes;
  piece.flags = flags;
  piece.region = {name.id, name.generation};
  std::string why = "it cannot be shared";
  bool room = true;
  try {
    piece.memory = session.mapsMemory()
                       ? session.connection().map(piece.region, reinterpret_cast<void*>(address), bound())
                       : transport::SharedMemory::create(bytes, reinterpret_cast<void*>(address));
  } catch (const std::exception& e) {
    room = dynamic_cast<const transport::ShortOfMemory*>(&e) == nullptr;
    why = e.what();
  }
  if (piece.memory != nullptr && !session.mapsMemory()) {
    piece.lent = session.connection().share(piece.memory);
    if (piece.lent == transport::Region{} && !session.isDoneAgain()) piece.memory.reset();
  }
  if (piece.memory == nullptr) {
    session.await<"sessionHostUnmap">(context, CUdeviceptr{address});
    status = room ? session.shareFailed() : CUDA_ERROR_OUT_OF_MEMORY;
    if (status == CUDA_ERROR_OUT_OF_MEMORY)
      GPUPOOL_WARNING("no pinned memory of %zu bytes: %s", bytes, why.c_str());
    return status;
  }
  piece.free[address] = bytes;
  std::lock_guard lock(mutex_);
  made = pieces_.emplace(address, std::move(piece)).first;
  return CUDA_SUCCESS;
}

// Room in a piece that allocations of the context share, or none.
HostMemory::PieceAt HostMemory::pieceWithRoom(CUcontext context, size_t bytes, uint64_t& address) {
  for (auto piece = pieces_.begin(); piece != pieces_.end(); ++piece) {
    if (piece->second.bytes != kSharedPiece || piece->second.context != context) continue;
    for (auto& [start, room] : piece->second.free)
      if (room >= bytes) {
        address = start;
        return piece;
      }
  }
  return pieces_.end();
}

CUresult HostMemory::allocate(CUcontext context, size_t bytes, unsigned flags, Use use, uint64_t& address) {
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  bool mirrored = use == Use::mirrored;
  size_t size = 0;
  {
    std::lock_guard order(growing_);
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    mirrored = mirrored && !Session::get().mapsMemory();
    // What mirrors is alone in its piece, which is fresh: a mirror begins with zeros on both sides.
    const bool alone = bytes > kSharedPiece / 4 || mirrored || use == Use::target;
    size = roundUp(bytes, alone ? kPage : kBlock);
    PieceAt piece = alone ? pieces_.end() : pieceWithRoom(context, size, address);
    if (piece == pieces_.end()) {
      CUresult status = addPiece(context, alone ? size : kSharedPiece, flags, piece);
      if (status != CUDA_SUCCESS) return status;
      address = piece->first;
    }
    size_t room = piece->second.free[address];
    piece->second.free.erase(address);
    if (room > size) piece->second.free[address + size] = room - size;
    piece->second.used += size;
    std::lock_guard lock(mutex_);
    blocks_[address] = size;
    if (use == Use::target) targets_.insert(address);
    if (use == Use::mirrored && !mirrored) addressed_.insert(address);
  }
  if (mirrored) addMirror(address, address, size);
  return CUDA_SUCCESS;
}

CUresult HostMemory::shareFile(CUcontext context, int descriptor, uint64_t offset, size_t bytes,
                               uint64_t& address) {
  transport::Descriptor file(descriptor);
  Session& session = Session::get();
  std::lock_guard order(growing_);
  const Transfers::Inside inside(session.transfers(), Transfers::named);
  if (!session.mapsMemory()) return CUDA_ERROR_NOT_SUPPORTED;  // it has gone to another host
  if (!takeAddress(bytes, address)) return CUDA_ERROR_OUT_OF_MEMORY;
  Piece piece;
  piece.context = context;
  piece.bytes = piece.used = bytes;
  CUresult status = CUDA_ERROR_NOT_SUPPORTED;
  try {
    piece.memory =
        transport::SharedMemory::ofFile(file.release(), offset, bytes, reinterpret_cast<void*>(address));
    piece.lent = session.connection().share(piece.memory);
    if (piece.lent != transport::Region{})
      status = session.await<"sessionHostShare">(context, CUdeviceptr{address},
                                                 schema::RegionName{piece.lent.id, piece.lent.generation});
  } catch (const std::exception& e) {
    GPUPOOL_DEBUG("registered memory is not shared: %s", e.what());
  }
  if (status != CUDA_SUCCESS) {
    if (piece.lent != transport::Region{}) session.connection().unshare(piece.lent);
    piece.memory.reset();
    freeAddresses_.emplace(bytes, address);
    return status;
  }
  piece.memory->closeDescriptor();  // programs may register many files, and have few descriptors
  std::lock_guard lock(mutex_);
  pieces_.emplace(address, std::move(piece));
  blocks_[address] = bytes;
  targets_.insert(address);
  return CUDA_SUCCESS;
}

bool HostMemory::freeBlock(PieceAt piece, uint64_t address, size_t bytes) {
  Piece& p = piece->second;
  p.used -= bytes;
  auto next = p.free.find(address + bytes);
  if (next != p.free.end()) {
    bytes += next->second;
    p.free.erase(next);
  }
  auto before = p.free.lower_bound(address);
  if (before != p.free.begin() && std::prev(before)->first + std::prev(before)->second == address) {
    --before;
    before->second += bytes;
  } else {
    p.free[address] = bytes;
  }
  return p.used == 0 && (p.bytes != kSharedPiece || p.memory->isOfFile() || pieces_.size() >= 4);
}

CUresult HostMemory::release(CUcontext context, uint64_t address) {
  std::unique_lock growing(growing_, std::defer_lock);
  std::optional<Transfers::Inside> inside;
  do {  // a move that comes between may have added one
    inside.reset();
    if (growing.owns_lock()) growing.unlock();
    removeMirror(address);
    growing.lock();
    inside.emplace(Session::get().transfers(), Transfers::named);
  } while (isMirrored(address));
  Piece gone;
  uint64_t start = 0;
  {
    std::lock_guard order(resending_);
    std::lock_guard lock(mutex_);
    auto block = blocks_.find(address);
    if (block == blocks_.end()) return CUDA_ERROR_INVALID_VALUE;
    const size_t size = block->second;
    std::erase_if(uploads_, [&](const Upload& upload) { return upload.overlaps(address, size); });
    blocks_.erase(block);
    targets_.erase(address);
    if (addressed_.erase(address) != 0)
      for (auto& noted : noted_) noted = 0;
    auto piece = std::prev(pieces_.upper_bound(address));
    if (!freeBlock(piece, address, size)) return CUDA_SUCCESS;
    start = piece->first;
    gone = std::move(piece->second);
    pieces_.erase(piece);
  }
  return unmap(growing, inside, context, start, std::move(gone));
}

void HostMemory::contextEnds(CUcontext context) {
  while (true) {
    std::unique_lock growing(growing_);
    std::optional<Transfers::Inside> inside(std::in_place, Session::get().transfers(), Transfers::named);
    std::unique_lock lock(mutex_);
    auto kept = std::find_if(pieces_.begin(), pieces_.end(), [&](const auto& piece) {
      return piece.second.context == context && piece.second.used == 0;
    });
    if (kept == pieces_.end()) return;
    const uint64_t start = kept->first;
    Piece gone = std::move(kept->second);
    pieces_.erase(kept);
    lock.unlock();
    unmap(growing, inside, context, start, std::move(gone));
  }
}

// The piece is in no list any more. It lets go of growing_ while it waits, and is not inside any more.
CUresult HostMemory::unmap(std::unique_lock<std::mutex>& growing, std::optional<Transfers::Inside>& inside,
                           CUcontext context, uint64_t start, Piece gone) {
  Session& session = Session::get();
  Session::Waiter answer;
  CUresult status = session.ask<"sessionHostUnmap">(answer, context, CUdeviceptr{start});
  if (gone.lent != transport::Region{}) session.connection().unshare(gone.lent);
  inside.reset();
  if (status == CUDA_SUCCESS) {
    // The driver waits for the device there, which may wait for what another thread calls.
    growing.unlock();
    status = session.collect<"sessionHostUnmap">(answer, CUdeviceptr{start});
    growing.lock();
  }
  parked_.push_back({start, gone.bytes, std::move(gone.memory)});
  // The worker may be in the middle of a transfer to it, over RDMA: some microseconds until it has let go.
  for (auto end = transport::Clock::now() + kLettingGo; !unmapParked() && transport::Clock::now() < end;) {
    growing.unlock();
    session.nap(std::chrono::microseconds(20));
    growing.lock();
  }
  return status;
}

// Unmaps what was released and is held by nobody else: from then on its addresses are the next piece's. True:
// all of it. Under growing_.
bool HostMemory::unmapParked() {
  std::erase_if(parked_, [&](Parked& parked) {
    if (parked.memory.use_count() > 1) return false;
    parked.memory.reset();
    freeAddresses_.emplace(parked.bytes, parked.address);
    return true;
  });
  return parked_.empty();
}

std::map<uint64_t, HostMemory::Piece>::const_iterator HostMemory::pieceOf(uint64_t address) const {
  auto after = pieces_.upper_bound(address);
  if (after == pieces_.begin()) return pieces_.end();
  auto piece = std::prev(after);
  return address - piece->first < piece->second.bytes ? piece : pieces_.end();
}

bool HostMemory::holds(uint64_t address, size_t bytes) const {
  const schema::AddressSpace& space = Session::get().space();
  if (address < space.hostBase || address - space.hostBase >= space.hostBytes) return false;
  std::lock_guard lock(mutex_);
  auto piece = pieceOf(address);
  return piece != pieces_.end() && bytes <= piece->second.bytes - (address - piece->first);
}

// ---- moves ----

size_t HostMemory::regions() const {
  std::lock_guard lock(mutex_);
  return pieces_.size();
}

bool HostMemory::prepareMove(transport::Connection& next, std::span<const schema::MovedRegion> regions,
                             bool lends, std::string& why) {
  std::lock_guard lock(mutex_);
  arrivals_.clear();
  for (const schema::MovedRegion& named : regions) {
    auto piece = pieces_.find(named.address);
    Arrival arrival{{named.region.id, named.region.generation}, {}};
    if (piece == pieces_.end() || !arrivals_.emplace(named.address, arrival).second) {
      why = "the new worker names pinned memory that the session does not have";
      return false;
    }
  }
  if (arrivals_.size() != pieces_.size()) {
    why = "the new worker does not name all of the session's pinned memory";
    return false;
  }
  if (next.mapsMemory() && !lends) return true;
  if (lends && !Session::get().mapsMemory() && !fetchTargets(next, why)) return false;
  for (auto& [address, arrival] : arrivals_) {
    arrival.lent = next.share(pieces_.find(address)->second.memory);
    if (arrival.lent == transport::Region{}) {
      why = "pinned memory cannot be shared with the new worker";
      return false;
    }
  }
  return true;
}

// Under mutex_. Over a network only the worker has what the device wrote there, until it is landed.
bool HostMemory::fetchTargets(transport::Connection& next, std::string& why) const {
  for (const uint64_t address : targets_) {
    if (fetchAt(next, address, blocks_.at(address))) continue;
    why = "the new worker does not give what the device has written for registered memory";
    return false;
  }
  return true;
}

bool HostMemory::fetchAt(transport::Connection& next, uint64_t address, size_t bytes) const {
  const auto piece = pieceOf(address);
  const auto arrival = piece == pieces_.end() ? arrivals_.end() : arrivals_.find(piece->first);
  if (arrival == arrivals_.end()) return false;
  const transport::Transfer transfer =
      next.get(reinterpret_cast<void*>(address), arrival->second.region, address - piece->first, bytes);
  return transfer != transport::kRefused && next.wait(transfer, bound());
}

bool HostMemory::fetchNext(transport::Connection& next, uint64_t address, size_t bytes) const {
  std::lock_guard lock(mutex_);
  return fetchAt(next, address, bytes);
}

bool HostMemory::lend(transport::Connection& next, std::string& why) {
  std::lock_guard lock(mutex_);
  arrivals_.clear();
  for (auto& [address, piece] : pieces_) {
    Arrival& arrival = arrivals_[address];
    arrival.lent = next.share(piece.memory);
    if (arrival.lent != transport::Region{}) continue;
    why = "pinned memory cannot be shared with the new worker";
    return false;
  }
  return true;
}

bool HostMemory::lentAtNext(uint64_t address, transport::Region& region, uint64_t& offset) const {
  std::lock_guard lock(mutex_);
  const auto piece = pieceOf(address);
  const auto arrival = piece == pieces_.end() ? arrivals_.end() : arrivals_.find(piece->first);
  if (arrival == arrivals_.end()) return false;
  region = arrival->second.lent;
  offset = address - piece->first;
  return true;
}

bool HostMemory::arrive(const std::map<uint64_t, transport::Region>& pinned, std::string& why) {
  std::lock_guard lock(mutex_);
  for (auto& [address, arrival] : arrivals_) {
    const auto named = pinned.find(address);
    if (named == pinned.end()) {
      why = "the new worker does not name all of the session's pinned memory";
      return false;
    }
    arrival.region = named->second;
  }
  return true;
}

void HostMemory::moved() {
  std::unique_lock order(mirrorMutex_, std::defer_lock);
  if (!Session::get().isProtected()) order.lock();
  std::lock_guard lock(mutex_);
  for (auto& [address, arrival] : arrivals_) {
    Piece& piece = pieces_.find(address)->second;
    piece.region = arrival.region;
    piece.lent = arrival.lent;
  }
  arrivals_.clear();
  if (Session::get().mapsMemory())
    shareMirrored();
  else
    mirrorAddressed();
}

}  // namespace gpupool::client
