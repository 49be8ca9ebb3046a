#include "client/memory/host.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/log.h"
#include "client/session.h"

namespace gpupool::client {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSharedPiece = size_t{2} << 20;
constexpr size_t kBlock = 256;
constexpr size_t kMostNoted = 1024;  // uploads: from here on those that were copied are looked for
constexpr size_t kApplyBytes = size_t{64} << 10;     // runs of one message of ours, on the control channel
constexpr size_t kCollectBytes = size_t{256} << 10;  // and of the worker's
// What the runs of so many bytes take at worst, every other byte changed; the worker clears as much.
size_t runsBytes(size_t bytes) { return std::min(kCollectBytes, 12 * ((bytes + 7) / 8 * 8) + 128); }
constexpr size_t kMostAsked = 64;  // mirrors at a time
constexpr size_t up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
constexpr std::chrono::seconds kLettingGo{2};  // later it is unmapped with the next call
transport::Deadline bound() { return transport::Clock::now() + std::chrono::seconds(30); }

}  // namespace

HostMemory& hostMemory() {
  static auto* memory = new HostMemory;
  return *memory;
}

// ---- the arena ----

CUresult HostMemory::addPiece(CUcontext context, size_t bytes, unsigned flags, PieceAt& made) {
  Session& session = Session::get();
  const schema::AddressSpace& space = session.space();
  if (nextAddress_ == 0) nextAddress_ = space.hostBase;
  uint64_t address = 0;
  unmapParked();
  auto again = freeAddresses_.find(bytes);
  if (again != freeAddresses_.end()) {
    address = again->second;
    freeAddresses_.erase(again);
  } else {
    if (bytes > space.hostBase + space.hostBytes - nextAddress_) return CUDA_ERROR_OUT_OF_MEMORY;
    address = nextAddress_;
    nextAddress_ += up(bytes, kSharedPiece);
  }
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
    if (piece.lent == transport::Region{}) piece.memory.reset();
  }
  if (piece.memory == nullptr) {
    session.post<"sessionHostUnmap">(context, CUdeviceptr{address});
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
  // What mirrors is alone in its piece, which is fresh: a mirror begins with zeros on both sides.
  const bool mirrored = use == Use::mirrored && !Session::get().mapsMemory();
  const bool alone = bytes > kSharedPiece / 4 || mirrored || use == Use::target;
  size_t size = up(bytes, alone ? kPage : kBlock);
  {
    const Transfers::Inside inside(Session::get().transfers(), Transfers::named);
    std::lock_guard order(growing_);
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
  }
  if (mirrored) addMirror(address, address, size);
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
  return p.used == 0 && (p.bytes != kSharedPiece || pieces_.size() >= 4);
}

CUresult HostMemory::release(CUcontext context, uint64_t address) {
  removeMirror(address);
  std::optional<Transfers::Inside> inside(std::in_place, Session::get().transfers(), Transfers::named);
  std::unique_lock growing(growing_);
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
    std::optional<Transfers::Inside> inside(std::in_place, Session::get().transfers(), Transfers::named);
    std::unique_lock growing(growing_);
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
  CUresult status = Session::get().post<"sessionHostUnmap">(context, CUdeviceptr{start});
  if (gone.lent != transport::Region{}) Session::get().connection().unshare(gone.lent);
  inside.reset();
  parked_.push_back({start, gone.bytes, std::move(gone.memory)});
  // The worker may be in the middle of a transfer to it, over RDMA: some microseconds until it has let go.
  for (auto end = transport::Clock::now() + kLettingGo; !unmapParked() && transport::Clock::now() < end;) {
    growing.unlock();
    Session::get().nap(std::chrono::microseconds(20));
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

// ---- copies over a network ----

CUresult HostMemory::awaitUpload(const void* from, size_t bytes) {
  CUresult status = awaitLandings(reinterpret_cast<uint64_t>(from), bytes);
  // A put lands as soon as it arrives: changes that are not applied yet would undo it.
  return status == CUDA_SUCCESS ? Session::get().awaitAsides() : status;
}

CUresult HostMemory::upload(const Stream& stream, const void* from, size_t bytes) {
  const auto address = reinterpret_cast<uint64_t>(from);
  {
    std::lock_guard lock(mutex_);
    if (!openFunctions_.empty()) note(stream, address, bytes);
  }
  return put(from, address, bytes);
}

// Under mutex_. The same bytes for the same stream again: once is enough.
void HostMemory::note(const Stream& stream, uint64_t from, size_t bytes) {
  const Upload fresh{from, bytes, stream.word, stream.posted + 1, nextFunction_ - 1};
  for (Upload& known : uploads_)
    if (known.from == from && known.bytes == bytes && known.word == fresh.word) {
      known = fresh;
      return;
    }
  if (uploads_.size() >= kMostNoted) {
    const Words& words = Session::get().words();
    std::erase_if(uploads_, [&](const Upload& u) { return words.reached(u.word, u.value); });
  }
  uploads_.push_back(fresh);
}

uint64_t HostMemory::hostFunctionBegins(const Stream& stream) {
  std::lock_guard lock(mutex_);
  openFunctions_[nextFunction_] = stream.word;
  return nextFunction_++;
}

// What is behind the function in its stream has not been copied: it waits for us. An upload of another stream
// may be behind it too, by an event; or it was copied already, and the device's own bytes may be coming to
// the same place.
void HostMemory::hostFunctionEnded(uint64_t function) {
  std::lock_guard order(resending_);
  std::vector<Upload> again;
  {
    std::lock_guard lock(mutex_);
    const Words& words = Session::get().words();
    std::erase_if(uploads_, [&](const Upload& u) { return words.reached(u.word, u.value); });
    const uint64_t word = openFunctions_[function];
    for (const Upload& upload : uploads_)
      if (upload.after >= function && (upload.word == word || !upload.overtaken)) again.push_back(upload);
    openFunctions_.erase(function);
    std::erase_if(uploads_, [&](const Upload& u) {
      return openFunctions_.empty() || u.after < openFunctions_.begin()->first;
    });
  }
  for (const Upload& upload : again)
    if (put(reinterpret_cast<const void*>(upload.from), upload.from, upload.bytes) != CUDA_SUCCESS)
      return;  // the session's end
}

// The worker's region that holds `address`, and where it starts.
bool HostMemory::regionAt(uint64_t address, transport::Region& region, uint64_t& start) const {
  std::lock_guard lock(mutex_);
  auto piece = pieceOf(address);
  if (piece == pieces_.end()) return false;
  region = piece->second.region;
  start = piece->first;
  return true;
}

CUresult HostMemory::put(const void* from, uint64_t to, size_t bytes, bool landed) {
  Session& session = Session::get();
  const Transfers::Inside inside(session.transfers(), Transfers::alone);
  transport::Region region;
  uint64_t start = 0;
  if (!regionAt(to, region, start)) return CUDA_ERROR_INVALID_VALUE;
  // The copy frame behind it is delivered after these bytes have landed (the transport's contract), and the
  // application may not touch them before that copy is done.
  transport::Transfer transfer = session.connection().put(from, region, to - start, bytes);
  const bool good = transfer != transport::kRefused &&
                    (!landed || session.connection().wait(transfer, transport::kForever));
  return good ? CUDA_SUCCESS : session.transferFailed();
}

CUresult HostMemory::get(void* to, uint64_t from, size_t bytes) {
  Session& session = Session::get();
  const Transfers::Inside inside(session.transfers(), Transfers::alone);
  transport::Region region;
  uint64_t start = 0;
  if (!regionAt(from, region, start)) return CUDA_ERROR_INVALID_VALUE;
  transport::Transfer transfer = session.connection().get(to, region, from - start, bytes);
  const bool good =
      transfer != transport::kRefused && session.connection().wait(transfer, transport::kForever);
  return good ? CUDA_SUCCESS : session.transferFailed();
}

// Where we have lent the worker the arena memory at `address`, and where that starts.
bool HostMemory::lentAt(uint64_t address, transport::Region& region, uint64_t& start) const {
  std::lock_guard lock(mutex_);
  auto piece = pieceOf(address);
  if (piece == pieces_.end()) return false;
  region = piece->second.lent;
  start = piece->first;
  return true;
}

CUresult HostMemory::download(const StreamRef& ref, uint64_t to, uint64_t from, size_t bytes) {
  Session& session = Session::get();
  transport::Region region;
  uint64_t start = 0;
  {
    std::lock_guard order(resending_);
    std::lock_guard lock(mutex_);
    if (pieceOf(to) == pieces_.end()) return CUDA_ERROR_INVALID_VALUE;
    for (Upload& upload : uploads_) upload.overtaken |= upload.overlaps(to, bytes);
    std::erase_if(landings_, [&](const Landing& l) { return session.words().reached(l.word, l.value); });
  }
  for (size_t at = 0; at < bytes; at += kTravel) {
    size_t n = std::min(kTravel, bytes - at);
    uint64_t value = 0;
    CUresult status = CUDA_ERROR_INVALID_VALUE;  // released meanwhile
    {
      const Transfers::Inside inside(session.transfers(), Transfers::named);
      if (lentAt(to, region, start))
        status = sendWithWord(ref, value, [&](uint64_t word) {
          return session.post<"sessionRead">(
              ref.context, ref.wire, CUdeviceptr{to + at}, CUdeviceptr{from + at}, n, ref.stream->word, word,
              schema::RegionName{region.id, region.generation}, to + at - start, nullptr, nullptr);
        });
    }
    if (status == CUDA_SUCCESS) status = keepCredit(ref);
    if (status != CUDA_SUCCESS) return status;
    std::lock_guard lock(mutex_);
    landings_.push_back({ref.stream->word, value, to + at, n});
  }
  return CUDA_SUCCESS;
}

// The bytes at `address` are about to be sent: what the device still owes there must have come.
CUresult HostMemory::awaitLandings(uint64_t address, size_t bytes) {
  std::vector<Landing> overlapping;
  {
    std::lock_guard lock(mutex_);
    for (auto& landing : landings_)
      if (landing.to < address + bytes && address < landing.to + landing.bytes)
        overlapping.push_back(landing);
  }
  for (auto& landing : overlapping) {
    CUresult status = Session::get().waitWord(landing.word, landing.value);
    if (status != CUDA_SUCCESS) return status;
  }
  return CUDA_SUCCESS;
}

// ---- moves ----

size_t HostMemory::regions() const {
  std::lock_guard lock(mutex_);
  return pieces_.size();
}

bool HostMemory::prepareMove(transport::Connection& next, std::span<const schema::MovedRegion> regions,
                             std::string& why) {
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
  if (next.mapsMemory()) return true;
  for (auto& [address, arrival] : arrivals_) {
    arrival.lent = next.share(pieces_.find(address)->second.memory);
    if (arrival.lent == transport::Region{}) {
      why = "pinned memory cannot be shared with the new worker";
      return false;
    }
  }
  return true;
}

void HostMemory::moved() {
  std::lock_guard lock(mutex_);
  for (auto& [address, arrival] : arrivals_) {
    Piece& piece = pieces_.find(address)->second;
    piece.region = arrival.region;
    piece.lent = arrival.lent;
  }
  arrivals_.clear();
}

CUresult HostMemory::settleSlow() {
  CUresult status = CUDA_SUCCESS;
  std::lock_guard order(mirrorMutex_);
  std::vector<Mirror*> all = allMirrors();
  std::erase_if(all, [](const Mirror* mirror) { return !mirror->base.agreed(); });
  for (size_t first = 0; first < all.size() && status == CUDA_SUCCESS; first += kMostAsked)
    status = collect(std::span(all).subspan(first, std::min(kMostAsked, all.size() - first)));
  return status;
}

// ---- mirrors ----

void HostMemory::addMirror(uint64_t host, uint64_t device, size_t bytes, Begins begins) {
  Mirror mirror{host, device, bytes, {}};
  if (begins == Begins::unknown) mirror.base.distrust();
  insertMirror(std::move(mirror));
}

bool HostMemory::isMirror(uint64_t host, uint64_t device) const {
  auto found = mirrors_.find(host);
  return found != mirrors_.end() && found->second.device == device;
}

bool HostMemory::mirrored(uint64_t host, size_t bytes, uint64_t& device) const {
  if (!mirroring()) return false;
  std::lock_guard lock(mutex_);
  auto after = mirrors_.upper_bound(host);
  if (after == mirrors_.begin()) return false;
  const Mirror& mirror = std::prev(after)->second;
  const uint64_t at = host - mirror.host;
  if (at >= mirror.bytes || bytes > mirror.bytes - at) return false;
  device = mirror.device + at;
  return true;
}

void HostMemory::insertMirror(Mirror mirror) {
  std::lock_guard lock(mutex_);
  if (isMirror(mirror.host, mirror.device)) return;
  mirrors_.emplace(mirror.host, std::move(mirror));
  mirrorCount_ = mirrors_.size();
}

// They stay as long as mirrorMutex_ is held: removing one takes it.
std::vector<HostMemory::Mirror*> HostMemory::allMirrors() {
  std::vector<Mirror*> all;
  std::lock_guard lock(mutex_);
  all.reserve(mirrors_.size());
  for (auto& [host, mirror] : mirrors_) all.push_back(&mirror);
  return all;
}

CUresult HostMemory::adoptManagedSymbol(uint64_t address, size_t bytes) {
  uint64_t first = address / kPage * kPage, end = up(address + bytes, kPage);
  {
    std::lock_guard lock(mutex_);
    if (mirrors_.count(address) != 0) return CUDA_SUCCESS;
  }
  // Symbols share pages: a page may be there already, from a neighbour.
  for (uint64_t page = first; page < end; page += kPage) {
    void* want = reinterpret_cast<void*>(page);
    void* got =
        mmap(want, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED && errno == EEXIST) {
      std::lock_guard lock(mutex_);
      if (symbolPages_.count(page) == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;  // something else of the application lives there
    } else if (got != want) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    std::lock_guard lock(mutex_);
    symbolPages_.insert(page);
  }
  addMirror(address, address, bytes);
  std::lock_guard order(mirrorMutex_);
  Mirror* mirror = nullptr;
  {
    std::lock_guard lock(mutex_);
    mirror = &mirrors_.find(address)->second;
  }
  Mirror* const one[] = {mirror};
  return collect(one);  // its initial value
}

void HostMemory::dropManagedSymbol(uint64_t address, size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (mirrors_.count(address) == 0) return;
  }
  removeMirror(address);
  // The pages stay, for a symbol that comes here next: it starts from zero on both sides.
  std::memset(reinterpret_cast<void*>(address), 0, bytes);
}

void HostMemory::removeMirror(uint64_t host, uint64_t device) {
  if (!mirroring()) return;
  std::lock_guard order(mirrorMutex_);
  std::lock_guard lock(mutex_);
  auto found = mirrors_.find(host);
  if (found == mirrors_.end() || (device != 0 && found->second.device != device)) return;
  mirrors_.erase(found);
  mirrorCount_ = mirrors_.size();
}

void HostMemory::mirrorArena(uint64_t address) {
  if (Session::get().mapsMemory()) return;
  uint64_t start = 0;
  size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(address);
    if (block == blocks_.begin()) return;
    --block;
    if (address - block->first >= block->second || targets_.count(block->first) != 0) return;
    start = block->first;
    bytes = block->second;
    if (isMirror(start, start)) return;
  }
  awaitLandings(start, bytes);  // what is sent first must not undo what the device brings
  addMirror(start, start, bytes, Begins::unknown);
}

CUresult HostMemory::publish() {
  if (!mirroring()) return CUDA_SUCCESS;
  std::lock_guard order(mirrorMutex_);
  std::vector<unsigned char> runs(kApplyBytes);
  for (Mirror* mirror : allMirrors())
    if (CUresult status = sendChanges(*mirror, runs); status != CUDA_SUCCESS) return status;
  return CUDA_SUCCESS;
}

CUresult HostMemory::sendChanges(Mirror& mirror, std::vector<unsigned char>& runs) {
  const std::byte* now = reinterpret_cast<const std::byte*>(mirror.host);
  do {
    const size_t bytes = mirror.base.collect(now, mirror.bytes, runs);
    if (bytes == 0) break;
    CUresult status =
        Session::get().post<"sessionMirrorApply">(nullptr, CUdeviceptr{mirror.device}, runs.data(), bytes);
    if (status != CUDA_SUCCESS) return status;
  } while (mirror.base.more());
  return CUDA_SUCCESS;
}

// All are asked for before the first answer is awaited: one round trip, not one each.
CUresult HostMemory::collect(std::span<Mirror* const> mirrors) {
  Session& session = Session::get();
  std::vector<unsigned char> runs(kCollectBytes);
  std::vector<Session::Waiter> asked(mirrors.size());
  CUresult status = CUDA_SUCCESS;
  size_t sent = 0, bytes = 0;
  for (; sent < mirrors.size(); ++sent) {
    const Mirror& mirror = *mirrors[sent];
    bytes = runsBytes(mirror.bytes);
    status = session.ask<"sessionMirrorCollect">(asked[sent], nullptr, CUdeviceptr{mirror.device},
                                                 mirror.bytes, bytes, runs.data(), &bytes);
    if (status != CUDA_SUCCESS) break;
  }
  for (size_t i = 0; i < sent; ++i) {  // every one, for the waiters are ours
    Mirror& mirror = *mirrors[i];
    const size_t room = runsBytes(mirror.bytes);
    CUresult answer = session.collect<"sessionMirrorCollect">(
        asked[i], CUdeviceptr{mirror.device}, mirror.bytes, bytes = room, runs.data(), &bytes);
    while (answer == CUDA_SUCCESS) {
      answer = take(mirror, std::span(runs).first(std::min(bytes, room)));
      if (answer != CUDA_SUCCESS || bytes + 64 < room) break;  // room was left: there is no more
      answer = session.await<"sessionMirrorCollect">(nullptr, CUdeviceptr{mirror.device}, mirror.bytes,
                                                     bytes = room, runs.data(), &bytes);
    }
    if (status == CUDA_SUCCESS) status = answer;
  }
  return status;
}

// The worker's runs, into the application's copy.
CUresult HostMemory::take(Mirror& mirror, std::span<const unsigned char> runs) {
  Reader in(std::as_bytes(runs));
  while (in.remaining() >= 16) {
    uint64_t offset = in.value<uint64_t>();
    auto data = in.blob();
    if (in.bad() || offset > mirror.bytes || data.size() > mirror.bytes - offset) return CUDA_ERROR_UNKNOWN;
    std::memcpy(reinterpret_cast<void*>(mirror.host + offset), data.data(), data.size());
    mirror.base.apply(offset, data);
  }
  return CUDA_SUCCESS;
}

}  // namespace gpupool::client
