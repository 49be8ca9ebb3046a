// The session's memory as another worker takes it over.
#include "base/log.h"
#include "server/worker/space.h"

namespace gpupool::server {

std::vector<Space::PieceState> Space::describe() const {
  std::lock_guard order(mapping_);
  std::map<const Physical*, uint64_t> names;
  for (const auto& [name, physical] : named_) names[physical.get()] = name;
  std::vector<PieceState> pieces;
  pieces.reserve(stock_.size());
  for (const Stock& stock : stock_) {
    PieceState& piece = pieces.emplace_back();
    piece.device = stock.physical->device;
    piece.bytes = stock.physical->bytes;
    if (const auto name = names.find(stock.physical.get()); name != names.end()) piece.name = name->second;
    for (const CUdeviceptr address : stock.mappedAt) {
      const Mapping& mapping = mappings_.at(address);
      piece.mappings.push_back({address, mapping.ofClient, mapping.access});
    }
  }
  return pieces;
}

bool Space::adopt(const std::vector<PieceState>& pieces, const std::vector<uint32_t>& peers) {
  std::lock_guard order(mapping_);
  if (!mappings_.empty() || !named_.empty() || peers.size() != devices_.size()) return false;
  peers_ = peers;
  stock_.clear();
  for (const PieceState& piece : pieces) {
    if (piece.device >= devices_.size() || piece.bytes == 0 || piece.bytes % (size_t{2} << 20) != 0)
      return false;
    if (account_.take(piece.device, piece.bytes) != CUDA_SUCCESS) return false;
    auto physical = std::make_shared<Physical>();
    physical->device = piece.device;
    physical->bytes = piece.bytes;
    physical->clean = true;  // its bytes are the session's own
    if (piece.name != 0) {
      if (named_.contains(piece.name)) return false;
      physical->named = true;
      named_[piece.name] = physical;
    }
    Stock& stock = stock_.emplace_back(Stock{physical, {}});
    std::lock_guard lock(mutex_);
    used_[piece.device] += piece.bytes;
    for (const MappingState& mapping : piece.mappings) {
      if (!inWindow(mapping.address, piece.bytes) || !isFree(mapping.address, piece.bytes)) return false;
      for (const auto& [device, flags] : mapping.access)
        if (device >= devices_.size()) return false;
      ++physical->mappings;
      stock.mappedAt.push_back(mapping.address);
      mappings_[mapping.address] = {physical, mapping.ofClient, mapping.access};
    }
  }
  return true;
}

std::map<uint64_t, std::shared_ptr<transport::SharedMemory>> Space::hostPieces() const {
  std::lock_guard lock(mutex_);
  std::map<uint64_t, std::shared_ptr<transport::SharedMemory>> pieces;
  for (const auto& [address, piece] : host_) pieces[address] = piece.memory;
  return pieces;
}

bool Space::adoptHost(uint64_t address, int descriptor, size_t bytes) {
  std::lock_guard order(mapping_);
  if (!inArena(address, bytes) || account_.take(Account::kHost, bytes) != CUDA_SUCCESS) return false;
  try {
    auto memory = transport::SharedMemory::adopt(descriptor, bytes, reinterpret_cast<void*>(address));
    std::lock_guard lock(mutex_);
    host_[address] = {std::move(memory), nullptr};
    hostRanges_[address] = bytes;
    return true;
  } catch (const std::exception& e) {
    GPUPOOL_WARNING("pinned memory of %zu bytes cannot be taken over: %s", bytes, e.what());
    return false;
  }
}

void Space::setRepeating(bool repeating) {
  repeating_ = repeating;
  if (repeating) return;
  for (const uint64_t address : lent_) unmapHost(address);
  lent_.clear();
}

bool Space::lend(uint64_t address, size_t bytes) {
  constexpr uint64_t kPage = 4096;
  constexpr size_t kMostLent = size_t{1} << 30;
  if (bytes == 0 || bytes > kMostLent || address > UINT64_MAX - bytes - kPage) return false;
  const uint64_t start = address / kPage * kPage, end = (address + bytes + kPage - 1) / kPage * kPage;
  std::shared_ptr<transport::SharedMemory> memory;
  if (mapHost(start, end - start, 0, memory) != CUDA_SUCCESS) return false;
  lent_.push_back(start);
  return true;
}

}  // namespace gpupool::server
