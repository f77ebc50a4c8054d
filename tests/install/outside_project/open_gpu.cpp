/// A program that shares tensors on a GPU names it in the options of its channels.

#include <cstdio>

#include <bulkhead/channel.h>
#include <ipc/cuda/gpu.h>

int main() {
    bulkhead::ChannelOptions options;
    const auto gpu = bulkhead::cuda::Gpu::open(0);
    if (gpu) options.gpu = *gpu;
    std::puts(gpu ? bulkhead::cuda::to_string(options.gpu->uuid()).c_str() : gpu.error().text().c_str());
}
