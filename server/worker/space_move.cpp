// The session's memory as another worker takes it over.
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "server/worker/space.h"

namespace gpupool::server {
namespace {

// Where pieces are mapped for a moment, if that is free: no other part of gpupool lies there.
constexpr CUdeviceptr kAsideBase = 0x4800'0000'0000;

}  // namespace

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

std::string Space::adopt(const std::vector<PieceState>& pieces, const std::vector<uint32_t>& peers) {
  constexpr char kMisfit[] = "the session's device memory does not fit its addresses";
  std::lock_guard order(mapping_);
  if (!mappings_.empty() || !named_.empty() || peers.size() != devices_.size()) return kMisfit;
  peers_ = peers;
  stock_.clear();
  for (const PieceState& piece : pieces) {
    if (piece.device >= devices_.size() || piece.bytes == 0 || piece.bytes % (size_t{2} << 20) != 0)
      return kMisfit;
    if (account_.take(piece.device, piece.bytes) != CUDA_SUCCESS)
      return "the lease has no room for the session's device memory";
    auto physical = std::make_shared<Physical>();
    physical->device = piece.device;
    physical->bytes = piece.bytes;
    physical->clean = true;  // its bytes are the session's own
    if (piece.name != 0) {
      if (named_.contains(piece.name)) return kMisfit;
      physical->named = true;
      named_[piece.name] = physical;
    }
    Stock& stock = stock_.emplace_back(Stock{physical, {}});
    std::lock_guard lock(mutex_);
    used_[piece.device] += piece.bytes;
    for (const MappingState& mapping : piece.mappings) {
      if (!inWindow(mapping.address, piece.bytes) || !isFree(mapping.address, piece.bytes)) return kMisfit;
      for (const auto& [device, flags] : mapping.access)
        if (device >= devices_.size()) return kMisfit;
      ++physical->mappings;
      stock.mappedAt.push_back(mapping.address);
      mappings_[mapping.address] = {physical, mapping.ofClient, mapping.access};
    }
  }
  return "";
}

CUresult Space::openPiece(size_t index, CUdeviceptr& address) {
  std::lock_guard order(mapping_);
  const Stock& stock = stock_.at(index);
  const Physical& physical = *stock.physical;
  for (const CUdeviceptr mapped : stock.mappedAt) {
    const Mapping& mapping = mappings_.at(mapped);
    const auto access = mapping.access.find(physical.device);
    address = mapped;
    if (!mapping.ofClient ||
        (access != mapping.access.end() && access->second == CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
      return CUDA_SUCCESS;
  }
  OpenAside& open = openAside_[index];
  if (open.users == 0) {
    const CUresult result = mapAside(physical.device, physical.handle, physical.bytes, open.address);
    if (result != CUDA_SUCCESS) return result;
  }
  ++open.users;
  address = open.address;
  return CUDA_SUCCESS;
}

// A part of a window: under ThreadSanitizer, where windows have 32 GiB, as much again leaves too little.
void Space::reserveAside() {
  asideBytes_ = layout_.windowBytes / 8;
  const CUresult result = driver_.cuMemAddressReserve(&aside_, asideBytes_, 0, kAsideBase, 0);
  if (result == CUDA_SUCCESS) return;
  GPUPOOL_WARNING("no addresses to map memory at for a moment: %s", driver_.describe(result).c_str());
  aside_ = asideBytes_ = 0;
}

// One behind the other, and from the front again: what lay there is over by then, or the mapping fails.
CUdeviceptr Space::takeAside(size_t bytes) {
  std::lock_guard lock(asideMutex_);
  if (bytes > asideBytes_) return 0;
  if (bytes > asideBytes_ - asideUsed_) asideUsed_ = 0;
  return aside_ + std::exchange(asideUsed_, asideUsed_ + bytes);
}

CUresult Space::mapAside(unsigned device, CUmemGenericAllocationHandle handle, size_t bytes,
                         CUdeviceptr& address) {
  address = takeAside(bytes);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  CUresult result = driver_.cuMemMap(address, bytes, 0, handle, 0);
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {devices_[device]}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (result == CUDA_SUCCESS) {
    result = driver_.cuMemSetAccess(address, bytes, &access, 1);
    if (result != CUDA_SUCCESS) driver_.cuMemUnmap(address, bytes);
  }
  return result;
}

void Space::unmapAside(CUdeviceptr address, size_t bytes) { driver_.cuMemUnmap(address, bytes); }

bool Space::staysOpen(size_t index, CUdeviceptr address) const {
  std::lock_guard order(mapping_);
  const auto& mapped = stock_.at(index).mappedAt;
  return std::find(mapped.begin(), mapped.end(), address) != mapped.end();
}

void Space::closePiece(size_t index, CUdeviceptr address) {
  if (staysOpen(index, address)) return;
  std::lock_guard order(mapping_);
  OpenAside& open = openAside_.at(index);
  if (--open.users == 0) unmapAside(open.address, stock_.at(index).physical->bytes);
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
    void* place = reinterpret_cast<void*>(address);
    auto memory = descriptor >= 0 ? transport::SharedMemory::adopt(descriptor, bytes, place)
                                  : transport::SharedMemory::create(bytes, place);
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
