// Kernels of which one calls a function of the heap: HEAP says which.
#include <cstdio>

__device__ int freedom, mallocCalls;

struct alignas(128) Aligned {
  int values[40];
};

__global__ void useHeap(void** p) {
#if HEAP == 0
  *p = reinterpret_cast<void*>(freedom + mallocCalls);
#elif HEAP == 1
  printf("%p\n", *p = malloc(4));
#elif HEAP == 2
  free(*p);
#elif HEAP == 3
  *p = new int[3];
#elif HEAP == 4
  delete static_cast<int*>(*p);
#elif HEAP == 5
  *p = new Aligned;
#endif
}
