// Runs a tuned model from C++ with TVM's runtime alone: no Python, no compiler.
//
//   run_model build/ 1,3,224,224 input.f32 output.f32 [runs]
//
// The first word is the folder that `python -m fusion tune` wrote, or a library in it. Of a model that was tuned for
// several shapes the library of the given one is taken, which lies in a folder of its name: build/1x3x224x224/model.so.
//
// The model takes one float32 tensor of the given shape, whose values input.f32 holds in C order, and gives one. How to
// compile it: docs/tutorials/fuse-and-deploy.md. Threads: the environment variable TVM_NUM_THREADS, as many as the model was tuned for.
// A library whose kernels use AMX asks the operating system for its tile registers by itself, when it is loaded.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
using ffi::Tensor;

constexpr int kPooledAllocator = 2;  // as tvm.runtime.vm.VirtualMachine.POOLED_ALLOCATOR

// Memory of the CPU on the boundary that TVM's kernels ask for.
struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    const size_t bytes = ffi::GetDataSize(*tensor);
    tensor->data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

std::vector<int64_t> ParseShape(const std::string& text) {
  std::vector<int64_t> shape;
  std::stringstream stream(text);
  for (std::string size; std::getline(stream, size, ',');) {
    char* end = nullptr;
    const long long extent = std::strtoll(size.c_str(), &end, 10);
    if (size.empty() || *end != '\0' || extent < 1) {
      throw std::runtime_error("shape " + text + ": give positive sizes, such as 1,3,224,224");
    }
    shape.push_back(extent);
  }
  return shape;
}

// The library of a build for inputs of ``shape_text``; ``path`` itself where it is no folder.
std::string FindLibrary(const std::filesystem::path& path, const std::string& shape_text) {
  if (!std::filesystem::is_directory(path)) {
    return std::filesystem::absolute(path).string();  // a bare name would be looked for in the system's folders
  }
  std::string name = shape_text;
  std::replace(name.begin(), name.end(), ',', 'x');
  std::string profiles;
  for (const auto& library : {path / "model.so", path / name / "model.so"}) {
    if (std::filesystem::exists(library)) {
      return library.string();
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (std::filesystem::exists(entry.path() / "model.so")) {
      profiles += " " + entry.path().filename().string();
    }
  }
  throw std::runtime_error(path.string() + ": holds no model.so for " + name +
                           (profiles.empty() ? "" : "; its profiles are" + profiles));
}

std::vector<float> ReadFloats(const std::string& path, size_t count) {
  std::vector<float> values(count);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(float)));
  if (static_cast<size_t>(file.gcount()) != count * sizeof(float)) {
    throw std::runtime_error(path + ": cannot be read, or holds fewer than " + std::to_string(count) + " floats");
  }
  return values;
}

// The virtual machine that computes a model, and its function ``main``.
class TunedModel {
 public:
  explicit TunedModel(const std::string& path) : library_(ffi::Module::LoadFromFile(path)) {
    machine_ = Function(library_, "vm_load_executable")().cast<ffi::Module>();
    Function(machine_, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
    main_ = Function(machine_, "main");
  }

  // A model of several outputs returns an array of tensors; this example takes the first.
  Tensor operator()(const Tensor& input) const {
    ffi::Any result = main_(input);
    if (auto outputs = result.try_cast<ffi::Array<Tensor>>()) {
      if (outputs->size() > 1 && !told_) {
        std::cerr << "the model has " << outputs->size() << " outputs: the first alone is written\n";
        told_ = true;
      }
      return (*outputs)[0];
    }
    return result.cast<Tensor>();
  }

 private:
  static ffi::Function Function(const ffi::Module& module, const std::string& name) {
    auto found = module->GetFunction(name);
    if (!found.has_value()) {
      throw std::runtime_error("the library has no function " + name + ": was it written by `python -m fusion tune`?");
    }
    return found.value();
  }

  ffi::Module library_;
  ffi::Module machine_{ffi::UnsafeInit()};
  ffi::Function main_;
  mutable bool told_ = false;
};

int Run(const std::string& library, const std::string& shape_text, const std::string& input_path,
        const std::string& output_path, int runs) {
  const std::string path = FindLibrary(library, shape_text);
  const std::vector<int64_t> shape = ParseShape(shape_text);
  Tensor input = Tensor::FromNDAlloc(AlignedMemory(), ffi::ShapeView(shape.data(), shape.size()),
                                     DLDataType{kDLFloat, 32, 1}, DLDevice{kDLCPU, 0});
  const std::vector<float> values = ReadFloats(input_path, static_cast<size_t>(input.numel()));
  std::copy(values.begin(), values.end(), static_cast<float*>(input.data_ptr()));

  TunedModel model(path);
  Tensor output = model(input);
  std::vector<double> milliseconds;
  for (int run = 0; run < runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    output = model(input);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  const auto count = static_cast<size_t>(output.numel());
  std::ofstream file(output_path, std::ios::binary);
  file.write(static_cast<const char*>(output.data_ptr()), static_cast<std::streamsize>(count * sizeof(float)));
  file.close();
  if (!file) {
    throw std::runtime_error(output_path + ": cannot be written");
  }
  std::sort(milliseconds.begin(), milliseconds.end());
  std::cout << count << " floats written to " << output_path << "; median of " << runs << " runs: "
            << milliseconds[milliseconds.size() / 2] << " ms\n";
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 5) {
    std::cerr << "usage: run_model BUILD SHAPE INPUT.f32 OUTPUT.f32 [RUNS]\n";
    return 2;
  }
  try {
    return Run(argv[1], argv[2], argv[3], argv[4], argc > 5 ? std::max(1, std::atoi(argv[5])) : 20);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
