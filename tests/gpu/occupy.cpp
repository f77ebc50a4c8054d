// gpu_occupy BYTES FILE: takes the first GPU's memory until BYTES are free, creates FILE, and
// holds on until it is killed. The driver API is opened at run time, so this builds and links
// where there is no GPU.

#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <iostream>

namespace {

constexpr std::size_t chunk_bytes = 64u << 20;  // small enough to come close to the wanted rest

template <typename Function>
Function* symbol(void* library, const char* name) {
    auto* found = reinterpret_cast<Function*>(::dlsym(library, name));
    if (found == nullptr) {
        std::cerr << "libcuda.so.1 has no " << name << "\n";
        std::exit(1);
    }
    return found;
}

void check(const char* call, int error) {
    if (error == 0) return;
    std::cerr << call << ": CUresult " << error << "\n";
    std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::cerr << "usage: gpu_occupy BYTES FILE\n";
        return 2;
    }
    const auto rest = static_cast<std::size_t>(std::strtoull(argv[1], nullptr, 10));
    void* cuda = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (cuda == nullptr) {
        std::cerr << ::dlerror() << "\n";
        return 1;
    }
    int device = 0;
    void* context = nullptr;
    check("cuInit", symbol<int(unsigned)>(cuda, "cuInit")(0));
    check("cuDeviceGet", symbol<int(int*, int)>(cuda, "cuDeviceGet")(&device, 0));
    check("cuDevicePrimaryCtxRetain", symbol<int(void**, int)>(cuda, "cuDevicePrimaryCtxRetain")(&context, device));
    check("cuCtxSetCurrent", symbol<int(void*)>(cuda, "cuCtxSetCurrent")(context));

    const auto ask = symbol<int(std::size_t*, std::size_t*)>(cuda, "cuMemGetInfo_v2");
    const auto take = symbol<int(unsigned long long*, std::size_t)>(cuda, "cuMemAlloc_v2");
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    unsigned long long address = 0;
    for (check("cuMemGetInfo", ask(&free_bytes, &total_bytes)); free_bytes > rest + chunk_bytes;
         check("cuMemGetInfo", ask(&free_bytes, &total_bytes)))
        check("cuMemAlloc", take(&address, chunk_bytes));

    std::ofstream{argv[2]} << free_bytes << "\n";
    ::pause();
}
