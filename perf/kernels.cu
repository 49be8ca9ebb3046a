// The two kernels that perf-cases launches.
extern "C" __global__ void empty() {}

extern "C" __global__ void sixteen(void* a, void* b, void* c, void* d, void* e, void* f, void* g, void* h,
                                   unsigned long long i, int j, int k, int l, int m, int n, int o, int p) {}
