// The linker (cuLink*).
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "server/worker/calls/driver_code.h"
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using LinkCreate = GPUPOOL_ROW(sessionLinkCreate);
using LinkAdd = GPUPOOL_ROW(sessionLinkAdd);
using LinkComplete = GPUPOOL_ROW(sessionLinkComplete);
using LinkRead = GPUPOOL_ROW(sessionLinkRead);
using LinkDestroy = GPUPOOL_ROW(cuLinkDestroy);

// The driver's JIT compiler keeps a link's state with the thread that made it: destroying a link whose input
// was refused on another thread crashes inside it (driver 580). So one thread serves all linker calls; theirs
// is a lane of its own.
class LinkThread {
 public:
  CUresult run(const std::function<CUresult()>& job) {
    std::unique_lock lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
    idle_.wait(lock, [&] { return job_ == nullptr; });
    CUresult result = CUDA_SUCCESS;
    bool done = false;
    job_ = &job;
    result_ = &result;
    done_ = &done;
    changed_.notify_all();
    finished_.wait(lock, [&] { return done; });
    return result;
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return job_ != nullptr; });
      auto* job = job_;
      lock.unlock();
      CUresult result = (*job)();
      lock.lock();
      *result_ = result;
      *done_ = true;
      job_ = nullptr;
      finished_.notify_all();
      idle_.notify_one();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_, finished_, idle_;
  const std::function<CUresult()>* job_ = nullptr;
  CUresult* result_ = nullptr;
  bool* done_ = nullptr;
  std::thread thread_;
};

// In the context of the call.
CUresult onLinkThread(Session& session, const Call& call, const std::function<CUresult()>& job) {
  static auto* thread = new LinkThread;
  return thread->run([&] {
    CUresult status = session.makeCurrent(call.frame.context);
    return status == CUDA_SUCCESS ? job() : status;
  });
}

}  // namespace

struct Link {
  std::unique_ptr<JitOptions> options;  // the driver writes through them until cuLinkDestroy
  std::vector<char> info = std::vector<char>(16384), error = std::vector<char>(16384);
  std::vector<std::byte> result;
};
struct LinkTable {
  std::unordered_map<uint64_t, std::shared_ptr<Link>> links;  // by handle
};

namespace {

std::mutex linksMutex;  // of every session's table

std::shared_ptr<Link> linkOf(Session& session, uint64_t id) {
  std::lock_guard lock(linksMutex);
  auto& table = session.links();
  if (table == nullptr) table = std::make_shared<LinkTable>();
  auto& link = table->links[id];
  if (link == nullptr) link = std::make_shared<Link>();
  return link;
}

void forgetLink(Session& session, uint64_t id) {
  std::lock_guard lock(linksMutex);
  if (session.links() != nullptr) session.links()->links.erase(id);
}

template <class S>
void copyLogs(S& served, const Link& link) {
  auto copy = [](auto& slot, const std::vector<char>& log) {
    if (slot.wanted() && !slot.array().empty())
      ::strncpy(slot.array().data(), log.data(), slot.array().size() - 1);
  };
  copy(served.template get<"infoLog">(), link.info);
  copy(served.template get<"errorLog">(), link.error);
}

void linkCreate(Session& session, Call& call) {
  Served<LinkCreate> served(session, call);
  if (!served.open()) return;
  auto link = linkOf(session, served.get<"link">().id());
  link->options =
      std::make_unique<JitOptions>(served.get<"options">().array(), served.get<"values">().array());
  JitOptions& options = *link->options;
  if (!options.good) {
    forgetLink(session, served.get<"link">().id());
    return served.close(CUDA_ERROR_INVALID_VALUE);
  }
  options.log(CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, link->info, true);
  options.log(CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, link->error, true);
  CUresult status = onLinkThread(session, call, [&] {
    return session.driver().cuLinkCreate_v2(static_cast<unsigned>(options.names.size()), options.names.data(),
                                            options.values.data(), served.get<"link">().pass());
  });
  if (status != CUDA_SUCCESS) forgetLink(session, served.get<"link">().id());
  served.close(status);
}

void linkAdd(Session& session, Call& call) {
  Served<LinkAdd> served(session, call);
  if (!served.open()) return;
  auto image = session.images().take(served.get<"image">().value());
  if (image == nullptr) return served.close(CUDA_ERROR_INVALID_IMAGE);
  DriverImage code(image, 0);
  if (code.pointer() == nullptr) return served.close(CUDA_ERROR_INVALID_IMAGE);
  JitOptions options(served.get<"options">().array(), served.get<"values">().array());
  if (!options.good) return served.close(CUDA_ERROR_INVALID_VALUE);
  // PTX with the terminator that follows every image.
  size_t size = image->bytes().size() + (served.get<"type">().value() == CU_JIT_INPUT_PTX ? 1 : 0);
  CUresult status = onLinkThread(session, call, [&] {
    return session.driver().cuLinkAddData_v2(
        served.get<"link">().value(), served.get<"type">().value(), const_cast<void*>(code.pointer()), size,
        served.get<"name">().pass(), static_cast<unsigned>(options.names.size()), options.names.data(),
        options.values.data());
  });
  copyLogs(served, *linkOf(session, served.get<"link">().id()));
  served.close(status);
}

// The driver may keep writing into the link's log buffers until now.
void linkDestroy(Session& session, Call& call) {
  Served<LinkDestroy> served(session, call);
  if (!served.open()) return;
  uint64_t id = served.get<"state">().id();
  CUresult status =
      onLinkThread(session, call, [&] { return served.invoke(session.driver().cuLinkDestroy); });
  if (status == CUDA_SUCCESS) forgetLink(session, id);
  served.close(status);
}

void linkComplete(Session& session, Call& call) {
  Served<LinkComplete> served(session, call);
  if (!served.open()) return;
  auto link = linkOf(session, served.get<"link">().id());
  void* result = nullptr;
  size_t bytes = 0;
  CUresult status = onLinkThread(session, call, [&] {
    return session.driver().cuLinkComplete(served.get<"link">().value(), &result, &bytes);
  });
  if (status == CUDA_SUCCESS) {
    auto* first = static_cast<const std::byte*>(result);
    link->result.assign(first, first + bytes);
    served.get<"bytes">().plain() = bytes;
  }
  copyLogs(served, *link);
  served.close(status);
}

void linkRead(Session& session, Call& call) {
  Served<LinkRead> served(session, call);
  if (!served.open()) return;
  auto link = linkOf(session, served.get<"link">().id());
  size_t offset = served.get<"offset">().value();
  auto& room = served.get<"data">().array();
  size_t n = offset <= link->result.size() ? std::min(room.size(), link->result.size() - offset) : 0;
  if (n != 0) std::memcpy(room.data(), link->result.data() + offset, n);
  served.get<"bytes">().plain() = n;
  served.close(CUDA_SUCCESS);
}

}  // namespace

void addLinkHandlers(HandlerTable& table) {
  table.add<LinkCreate>(&linkCreate);
  table.add<LinkAdd>(&linkAdd);
  table.add<LinkComplete>(&linkComplete);
  table.add<LinkRead>(&linkRead);
  table.add<LinkDestroy>(&linkDestroy);
}

}  // namespace gpupool::server
