// Copies of arena memory over a network.
#include <algorithm>

#include "client/memory/host.h"
#include "client/session.h"

namespace gpupool::client {
namespace {

constexpr size_t kMostNoted = 1024;  // uploads: from here on those that were copied are looked for

}  // namespace

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
  // The worker has these very bytes.
  if (session.mapsMemory() && reinterpret_cast<uint64_t>(from) == to) return CUDA_SUCCESS;
  // The copy frame behind it is delivered after these bytes have landed (the transport's contract), and the
  // application may not touch them before that copy is done.
  session.notePut(CallLog::Place::pinned, to, from, bytes);
  transport::Transfer transfer = session.connection().put(from, region, to - start, bytes);
  const bool good = transfer != transport::kRefused &&
                    (!landed || session.connection().wait(transfer, transport::kForever));
  return good || session.isDoneAgain() ? CUDA_SUCCESS : session.transferFailed();
}

CUresult HostMemory::get(void* to, uint64_t from, size_t bytes) {
  Session& session = Session::get();
  bool here = false;  // the worker has these very bytes
  const auto where = [&](transport::Region& region, uint64_t& offset) {
    uint64_t start = 0;
    here = session.mapsMemory() && reinterpret_cast<uint64_t>(to) == from;
    if (here || !regionAt(from, region, start)) return false;
    offset = from - start;
    return true;
  };
  const CUresult status =
      session.fetch(CallLog::Place::pinned, from, {static_cast<std::byte*>(to), bytes}, where);
  return here ? CUDA_SUCCESS : status;
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
      const bool lent = lentAt(to, region, start);
      if (session.mapsMemory()) region = {};  // the device writes there itself
      if (lent)
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

}  // namespace gpupool::client
