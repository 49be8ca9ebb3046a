// Streams, events, host functions, stream memory operations.
#include <atomic>

#include "api_support.h"

using namespace apitest;

namespace {

void CUDA_CB note(void* flag) { *static_cast<std::atomic<int>*>(flag) += 1; }

struct Streams {
  CUstream a = nullptr, b = nullptr;
  explicit Streams(unsigned flags = CU_STREAM_NON_BLOCKING) {
    OK(cuStreamCreate(&a, flags));
    OK(cuStreamCreate(&b, flags));
  }
  ~Streams() {
    cuStreamDestroy(a);
    cuStreamDestroy(b);
  }
};

}  // namespace

TEST_CASE("a launch returns before the kernel ends, and streams run side by side") {
  Session session;
  Streams s;
  Word gate;
  Buffer<int> b(1);
  OK(launch(session.function("waitFor"), 1, 0, s.a, gate.device));
  GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(s.a));
  OK(launch(session.function("addTo"), 1, 0, s.b, b.address, 4));
  OK(cuStreamSynchronize(s.b));
  GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(s.a));
  *gate.host = 1;
  OK(cuStreamSynchronize(s.a));
  OK(cuStreamQuery(s.a));
  CHECK(b.get()[0] == 4);
}

TEST_CASE("events order streams and tell the time") {
  Session session;
  Streams s;
  Word gate;
  Buffer<int> list(4), count(1);
  CUevent done, start, end;
  OK(cuEventCreate(&done, CU_EVENT_DISABLE_TIMING));
  OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
  OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
  OK(cuEventQuery(done));  // never recorded
  float ms = -1;
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, start, end));
  OK(cuEventRecord(start, s.a));
  OK(launch(session.function("waitFor"), 1, 0, s.a, gate.device));
  OK(launch(session.function("append"), 1, 0, s.a, list.address, count.address, 1));
  OK(cuEventRecord(done, s.a));
  OK(cuStreamWaitEvent(s.b, done, 0));
  OK(launch(session.function("append"), 1, 0, s.b, list.address, count.address, 2));
  OK(cuEventRecord(end, s.b));
  GIVES(CUDA_ERROR_NOT_READY, cuEventQuery(done));
  GIVES(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&ms, start, end));
  pause(20);
  *gate.host = 1;
  OK(cuEventSynchronize(end));
  OK(cuEventElapsedTime(&ms, start, end));
  CHECK(ms >= 19);
  CHECK(ms < 20000);
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&ms, start, done));
  auto order = list.get();
  CHECK(order[0] == 1);
  CHECK(order[1] == 2);
  for (CUevent event : {done, start, end}) OK(cuEventDestroy(event));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(done, s.a));
}

TEST_CASE("an event of a context comes behind all that its streams had to do, and no more") {
  Session session;
  Streams free, blocking(CU_STREAM_DEFAULT);
  CUevent event;
  OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
  CUfunction waitFor = session.function("waitFor"), add = session.function("addTo");
  OK(cuCtxRecordEvent(session.context, event));
  OK(cuEventQuery(event));
  for (CUstream stream : {free.a, blocking.a, CUstream(nullptr), CU_STREAM_PER_THREAD}) {
    Word gate, after;
    Buffer<int> b(1);
    OK(launch(waitFor, 1, 0, stream, gate.device));
    OK(cuCtxRecordEvent(session.context, event));
    OK(launch(waitFor, 1, 0, free.b, after.device));
    OK(launch(add, 1, 0, free.b, b.address, 2));
    GIVES(CUDA_ERROR_NOT_READY, cuEventQuery(event));
    *gate.host = 1;
    OK(cuEventSynchronize(event));
    OK(cuStreamQuery(stream));
    GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(free.b));
    *after.host = 1;
    OK(cuCtxSynchronize());
    CHECK(b.get()[0] == 2);
  }
  OK(cuEventDestroy(event));
}

TEST_CASE("a context that waits for an event holds back what its streams are given from then on") {
  Session session;
  CUcontext other;
  CUstream elsewhere, later;
  CUevent event;
  OK(cuCtxCreate(&other, nullptr, 0, 0));
  OK(cuStreamCreate(&elsewhere, CU_STREAM_NON_BLOCKING));
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuCtxSetCurrent(session.context));
  Streams s;
  Word gate, before;
  Buffer<int> b(1), there(1);
  CUfunction waitFor = session.function("waitFor"), add = session.function("addTo");
  OK(cuCtxWaitEvent(session.context, event));  // never recorded
  OK(launch(waitFor, 1, 0, s.b, before.device));
  OK(cuStreamWaitValue32(elsewhere, gate.device, 1, CU_STREAM_WAIT_VALUE_GEQ));
  OK(cuEventRecord(event, elsewhere));
  OK(cuCtxWaitEvent(session.context, event));
  OK(cuStreamCreate(&later, CU_STREAM_NON_BLOCKING));
  for (CUstream stream : {s.a, later, CUstream(nullptr), CU_STREAM_PER_THREAD})
    OK(launch(add, 1, 0, stream, b.address, 1));
  for (CUstream stream : {s.a, later, CUstream(nullptr), CU_STREAM_PER_THREAD})
    GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
  // Not what it was given before, nor another context.
  *before.host = 1;
  OK(cuStreamSynchronize(s.b));
  OK(cuCtxWaitEvent(session.context, event));
  *gate.host = 1;
  OK(cuCtxSynchronize());
  CHECK(b.get()[0] == 4);
  OK(cuStreamDestroy(later));
  OK(cuCtxDestroy(other));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxWaitEvent(session.context, event));  // it ended with its context
}

TEST_CASE("events of a context: what they refuse") {
  Session session;
  Streams s;
  CUcontext other;
  CUevent event, foreign, captured;
  OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  OK(cuEventCreate(&captured, CU_EVENT_DISABLE_TIMING));
  OK(cuCtxCreate(&other, nullptr, 0, 0));
  OK(cuEventCreate(&foreign, CU_EVENT_DISABLE_TIMING));
  OK(cuCtxSetCurrent(session.context));
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxRecordEvent(nullptr, event));
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxWaitEvent(nullptr, event));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(session.context, nullptr));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxWaitEvent(session.context, nullptr));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(session.context, foreign));
  CUgraph graph = nullptr;
  const auto capturing = [&](CUcontext context, CUevent which, bool record, bool spoils) {
    OK(cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cuEventRecord(captured, s.a));
    GIVES(spoils ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS,
          record ? cuCtxRecordEvent(context, which) : cuCtxWaitEvent(context, which));
    GIVES(spoils ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS, cuStreamEndCapture(s.a, &graph));
    if (graph != nullptr) OK(cuGraphDestroy(graph));
  };
  capturing(session.context, event, true, true);
  capturing(session.context, event, false, true);
  capturing(other, captured, false, true);
  capturing(other, foreign, true, false);
  capturing(other, foreign, false, false);
  GIVES(CUDA_ERROR_INVALID_VALUE, cuCtxWaitEvent(other, captured));  // its capture is over
  OK(cuEventDestroy(captured));
  OK(cuEventDestroy(event));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuCtxRecordEvent(session.context, event));
  OK(cuCtxDestroy(other));
  GIVES(CUDA_ERROR_INVALID_CONTEXT, cuCtxRecordEvent(other, event));
}

TEST_CASE("the legacy stream waits for blocking streams and they for it; others do neither") {
  Session session;
  Streams blocking(CU_STREAM_DEFAULT), free(CU_STREAM_NON_BLOCKING);
  Word gate;
  Buffer<int> list(4), count(1);
  CUfunction append = session.function("append");
  OK(launch(session.function("waitFor"), 1, 0, blocking.a, gate.device));
  OK(launch(append, 1, 0, blocking.a, list.address, count.address, 1));
  OK(launch(append, 1, 0, nullptr, list.address, count.address, 2));
  OK(launch(append, 1, 0, blocking.b, list.address, count.address, 3));
  OK(launch(append, 1, 0, free.a, list.address, count.address, 9));
  OK(cuStreamSynchronize(free.a));
  GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(blocking.b));
  GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(nullptr));
  *gate.host = 1;
  OK(cuCtxSynchronize());
  CHECK(list.get() == std::vector<int>{9, 1, 2, 3});
}

TEST_CASE("each thread has a default stream of its own") {
  Session session;
  Word gate;
  Buffer<int> b(1);
  OK(launch(session.function("waitFor"), 1, 0, CU_STREAM_PER_THREAD, gate.device));
  std::thread([&] {
    OK(cuCtxSetCurrent(session.context));
    OK(launch(session.function("addTo"), 1, 0, CU_STREAM_PER_THREAD, b.address, 3));
    OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  }).join();
  GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(CU_STREAM_PER_THREAD));
  *gate.host = 1;
  OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
  CHECK(b.get()[0] == 3);
}

TEST_CASE("values are written and waited for in stream order") {
  Session session;
  Streams s;
  Buffer<uint64_t> words(4);
  Buffer<int> list(4), count(1);
  CUfunction append = session.function("append");
  OK(cuStreamWaitValue64(s.a, words.address, 5, CU_STREAM_WAIT_VALUE_GEQ));
  OK(launch(append, 1, 0, s.a, list.address, count.address, 2));
  OK(cuStreamWriteValue64(s.a, words.address + 8, 1, 0));
  OK(launch(append, 1, 0, s.b, list.address, count.address, 1));
  OK(cuStreamSynchronize(s.b));
  GIVES(CUDA_ERROR_NOT_READY, cuStreamQuery(s.a));
  OK(cuStreamWriteValue64(s.b, words.address, 6, 0));
  OK(cuStreamWaitValue32(s.b, words.address + 8, 1, CU_STREAM_WAIT_VALUE_EQ));
  OK(launch(append, 1, 0, s.b, list.address, count.address, 3));
  OK(cuStreamSynchronize(s.b));
  CHECK(list.get() == std::vector<int>{1, 2, 3, 0});
  CUstreamBatchMemOpParams ops[2] = {};
  ops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  ops[0].writeValue.address = words.address + 16;
  ops[0].writeValue.value = 7;
  ops[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  ops[1].waitValue.address = words.address + 16;
  ops[1].waitValue.value = 3;
  ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_AND;
  OK(cuStreamBatchMemOp(s.a, 2, ops, 0));
  OK(cuStreamSynchronize(s.a));
  GIVES(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue64(s.a, words.address + 4, 1, 0));
}

TEST_CASE("host functions run in order and may not call the driver") {
  Session session;
  Streams s;
  Word gate;
  std::atomic<int> ran{0};
  OK(launch(session.function("waitFor"), 1, 0, s.a, gate.device));
  OK(cuLaunchHostFunc(s.a, note, &ran));
  static std::atomic<int> inside{-1};
  OK(cuLaunchHostFunc(
      s.a,
      [](void*) {
        CUdeviceptr p;
        inside = cuMemAlloc(&p, 16);
      },
      nullptr));
  static std::atomic<int> status{-1};
  OK(cuStreamAddCallback(s.a, [](CUstream, CUresult result, void*) { status = result; }, nullptr, 0));
  pause(10);
  CHECK(ran == 0);
  *gate.host = 1;
  OK(cuStreamSynchronize(s.a));
  CHECK(ran == 1);
  CHECK(inside == CUDA_ERROR_NOT_PERMITTED);
  CHECK(status == CUDA_SUCCESS);
}

TEST_CASE("copies from pageable memory are taken at the call, into it done at return") {
  Session session;
  Streams s;
  Word gate;
  Buffer<int> b(100);
  std::vector<int> in(100, 5), out(100);
  OK(launch(session.function("waitFor"), 1, 0, s.a, gate.device));
  OK(cuMemcpyHtoDAsync(b.address, in.data(), 400, s.a));
  in.assign(100, 6);
  std::thread opener([&] {
    pause(20);
    *gate.host = 1;
  });
  OK(cuMemcpyDtoHAsync(out.data(), b.address, 400, s.a));
  CHECK(out[99] == 5);
  opener.join();
}

TEST_CASE("streams know themselves") {
  Session session;
  CUstream stream;
  OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -100));
  int priority = 1;
  unsigned flags = 9;
  unsigned long long id = 0, legacy = 0;
  CUcontext context = nullptr;
  OK(cuStreamGetPriority(stream, &priority));
  CHECK(priority == -5);
  OK(cuStreamGetFlags(stream, &flags));
  CHECK(flags == CU_STREAM_NON_BLOCKING);
  OK(cuStreamGetId(stream, &id));
  OK(cuStreamGetId(nullptr, &legacy));
  CHECK(id != legacy);
  OK(cuStreamGetCtx(stream, &context));
  CHECK(context == session.context);
  OK(cuStreamDestroy(stream));
  GIVES(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(reinterpret_cast<CUstream>(uintptr_t(0x70))));
}

TEST_CASE("work of a destroyed stream still runs") {
  Session session;
  CUstream stream;
  Word gate;
  Buffer<int> b(1);
  OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  OK(launch(session.function("waitFor"), 1, 0, stream, gate.device));
  OK(launch(session.function("addTo"), 1, 0, stream, b.address, 8));
  OK(cuStreamDestroy(stream));
  *gate.host = 1;
  OK(cuCtxSynchronize());
  CHECK(b.get()[0] == 8);
}

TEST_CASE("many threads share the context") {
  Session session;
  Buffer<int> b(1);
  CUfunction add = session.function("addTo");
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      cuCtxSetCurrent(session.context);
      CUstream stream;
      cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
      for (int i = 0; i < 50; ++i) {
        CUdeviceptr p = 0;
        cuMemAllocAsync(&p, 1000, stream);
        cuMemsetD8Async(p, 1, 1000, stream);
        launch(add, 1, 0, stream, b.address, 1);
        cuMemFreeAsync(p, stream);
      }
      cuStreamSynchronize(stream);
      cuStreamDestroy(stream);
    });
  }
  for (auto& thread : threads) thread.join();
  OK(cuCtxSynchronize());
  CHECK(b.get()[0] == 200);
}
