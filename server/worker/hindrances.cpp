#include "server/worker/hindrances.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "schema/array_format.h"
#include "schema/rows.h"

namespace gpupool::server {
namespace {

constexpr char kUnreadable[] = "a code image of the program is not in the server's cache, or cannot be read";
constexpr char kHeap[] = "kernels of the program may use the device's heap (malloc, new)";
constexpr char kFormat[] = "an array of the program has a format that cannot be copied";

// The image that a module or library was loaded from; arguments as sessionModuleLoad and sessionLibraryLoad
// have them.
struct LoadedImage {
  schema::ImageName name;
  unsigned kind = 0;
};
std::optional<LoadedImage> imageOf(const Record::Entry& load) {
  schema::Reader in(load.arguments);
  in.value<uint64_t>();
  LoadedImage image;
  image.name = in.value<schema::ImageName>();
  image.kind = static_cast<unsigned>(in.value<uint64_t>());
  return in.bad() ? std::nullopt : std::optional(image);
}

// Was an array made with a shape that can be copied? Behind its handle and a word that says that there is
// one. Of what is made otherwise a move asks the driver.
bool madeForCopies(const Record::Entry& making) {
  schema::Reader in(making.arguments);
  in.value<uint64_t>();
  in.value<uint64_t>();
  CUDA_ARRAY3D_DESCRIPTOR_v2 shape{};
  if (making.frame.call == schema::RowOf<"cuArrayCreate_v2">::id) {
    const auto flat = in.value<CUDA_ARRAY_DESCRIPTOR_v2>();
    shape.Format = flat.Format;
    shape.NumChannels = flat.NumChannels;
  } else if (making.frame.call == schema::RowOf<"cuArray3DCreate_v2">::id ||
             making.frame.call == schema::RowOf<"cuMipmappedArrayCreate">::id) {
    shape = in.value<CUDA_ARRAY3D_DESCRIPTOR_v2>();
  } else {
    return true;
  }
  return in.bad() || canBeCopied(shape);
}

const Images::Contents* codeContents(Session& session, const Record::Entry& load) {
  const auto image = imageOf(load);
  return image ? session.images().contents(image->name, image->kind, session.architecture()) : nullptr;
}

}  // namespace

bool canBeCopied(const CUDA_ARRAY3D_DESCRIPTOR_v2& shape) {
  return (shape.Flags & (CUDA_ARRAY3D_DEFERRED_MAPPING | CUDA_ARRAY3D_SPARSE)) == 0 &&
         schema::arrayElementBytes(shape.Format, shape.NumChannels) != 0;
}

std::vector<LoadedCode> loadedCode(Session& session) {
  std::map<uint64_t, Record::Entry> loads;
  for (const auto kind : {HandleKind::module, HandleKind::library})
    for (auto& [owner, entry] : session.record().living(kind)) loads[owner] = std::move(entry);
  std::vector<LoadedCode> all;
  for (const auto& [owner, context] : session.record().loadedCode()) {
    LoadedCode& code = all.emplace_back(LoadedCode{owner, context, nullptr});
    const auto load = loads.find(owner);
    if (load != loads.end()) code.contents = codeContents(session, load->second);
  }
  return all;
}

std::vector<LoadedCode> unloadedManaged(Session& session) {
  std::set<uint64_t> loaded;
  for (const auto& [owner, context] : session.record().loadedCode()) loaded.insert(owner);
  std::vector<LoadedCode> all;
  for (const auto& [owner, entry] : session.record().living(HandleKind::library))
    if (!loaded.contains(owner) && session.space().hasManaged(owner))
      all.push_back({owner, 0, codeContents(session, entry)});
  return all;
}

std::vector<std::string> hindrances(Session& session) {
  std::vector<std::string> all;
  const auto add = [&](const char* reason) {
    if (std::find(all.begin(), all.end(), reason) == all.end()) all.emplace_back(reason);
  };
  if (session.shared() != 0) add(session.whyShared());
  for (const LoadedCode& code : loadedCode(session)) {
    if (code.contents == nullptr)
      add(kUnreadable);
    else if (code.contents->mayAllocate)
      add(kHeap);
  }
  for (const auto kind : {HandleKind::array, HandleKind::mipmap})
    for (const auto& [id, making] : session.record().living(kind))
      if (!madeForCopies(making)) add(kFormat);
  return all;
}

HindranceWatch::HindranceWatch(Session& session, Report report)
    : session_(session), report_(std::move(report)), thread_([this] { run(); }) {}

HindranceWatch::~HindranceWatch() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  over_.notify_all();
  thread_.join();
}

void HindranceWatch::run() {
  setpriority(PRIO_PROCESS, 0, 19);  // this thread's
  std::pair<uint64_t, size_t> seen;
  std::vector<std::string> told;
  std::unique_lock lock(mutex_);
  while (!over_.wait_for(lock, kLook, [this] { return ending_; })) {
    const std::pair<uint64_t, size_t> changes(session_.record().changes(), session_.shared());
    if (changes == seen || session_.stopping()) continue;
    seen = changes;
    lock.unlock();
    std::vector<std::string> now = hindrances(session_);
    if (now != told) report_(told = std::move(now));
    lock.lock();
  }
}

}  // namespace gpupool::server
