#pragma once
// What separate_device.cu offers to other translation units, on the host and on the device.
extern __device__ int sharedTable[16];
extern __device__ int sharedCalls;
extern __device__ int (*chosenFunction)(int);

__host__ __device__ int mix(int value, int index);
void fillTableOnDevice();
int readCallsInOtherFile();
