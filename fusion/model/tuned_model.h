// A network that `fusion tune` wrote, from C++: arrays in, arrays out, with TVM's runtime alone.
//
//   fusion::TunedModel model("build/");
//   fusion::Array image = model.inputs()[0].zeros();      // or fusion::Array("uint8", {1, 224, 224, 3})
//   std::copy(pixels.begin(), pixels.end(), image.data<float>());
//   std::vector<fusion::Array> outputs = model.run({image});
//   const float* scores = outputs[0].data<float>();
//
// Whatever is wrong (no build, another CPU, arrays that do not fit) is a fusion::Error with one line that says what to
// do. How to compile it and what to ship: docs/deploying.md. This header goes with the TVM that the model was built with.

#ifndef FUSION_TUNED_MODEL_H_
#define FUSION_TUNED_MODEL_H_

#include <sys/syscall.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace fusion {

// One line for the user.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {

namespace ffi = tvm::ffi;
namespace fs = std::filesystem;

constexpr int kPooledAllocator = 2;  // as tvm.runtime.vm.VirtualMachine.POOLED_ALLOCATOR
constexpr int64_t kManifestFormat = 1;
constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of Linux: asks for the tile registers of AMX

// Memory of the CPU on the boundary that TVM's kernels ask for.
struct AlignedMemory {
  void AllocData(DLTensor* tensor) {
    const size_t bytes = (std::max<size_t>(ffi::GetDataSize(*tensor), 1) + 63) / 64 * 64;
    tensor->data = std::aligned_alloc(64, bytes);
    if (tensor->data == nullptr) throw Error("no memory for an array of " + std::to_string(bytes) + " bytes");
    std::memset(tensor->data, 0, bytes);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

inline std::string Listed(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t extent : shape) text += (text.empty() ? "" : ",") + std::to_string(extent);
  return text;
}

// The name that NumPy gives to the elements of T; bytes of 16-bit floats are uint16_t.
template <typename T>
bool Holds(const std::string& dtype) {
  if constexpr (std::is_same_v<T, bool>) return dtype == "bool";
  if constexpr (std::is_same_v<T, uint16_t>) {
    if (dtype == "float16" || dtype == "bfloat16") return true;
  }
  static_assert(std::is_arithmetic_v<T>, "elements of arrays are numbers");
  const char* kind = std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
  return dtype == kind + std::to_string(8 * sizeof(T));
}

}  // namespace detail

// Numbers in C order. Copies share their memory.
class Array {
 public:
  // Of zeros. ``dtype`` is NumPy's name: float32, uint8, bool...
  Array(const std::string& dtype, const std::vector<int64_t>& shape) : Array(Allocated(dtype, shape)) {}
  explicit Array(detail::ffi::Tensor tensor) : tensor_(std::move(tensor)) {}

  std::string dtype() const { return std::string(detail::ffi::DLDataTypeToString(tensor_.dtype())); }
  std::vector<int64_t> shape() const { return {tensor_.shape().begin(), tensor_.shape().end()}; }
  size_t size() const { return static_cast<size_t>(tensor_.numel()); }
  size_t bytes() const { return detail::ffi::GetDataSize(*tensor_.GetDLTensorPtr()); }

  // The elements; Error if they are of another type (float16 and bfloat16 are read as uint16_t).
  template <typename T>
  T* data() const {
    if (!detail::Holds<T>(dtype())) throw Error("an array of " + dtype() + " is read as another type");
    return static_cast<T*>(raw());
  }
  void* raw() const { return tensor_.data_ptr(); }
  const detail::ffi::Tensor& tensor() const { return tensor_; }

 private:
  static detail::ffi::Tensor Allocated(const std::string& dtype, const std::vector<int64_t>& shape) {
    if (std::any_of(shape.begin(), shape.end(), [](int64_t extent) { return extent < 0; })) {
      throw Error("shape " + detail::Listed(shape) + ": sizes are 0 or more");
    }
    try {
      return detail::ffi::Tensor::FromNDAlloc(detail::AlignedMemory(), detail::ffi::ShapeView(shape.data(), shape.size()),
                                              detail::ffi::StringToDLDataType(dtype), DLDevice{kDLCPU, 0});
    } catch (const detail::ffi::Error&) {
      throw Error(dtype + ": no data type; one is for example float32");
    }
  }

  detail::ffi::Tensor tensor_;
};

// An input or output of a model.
struct TensorInfo {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype;

  Array zeros() const { return Array(dtype, shape); }
  std::string text() const { return name + ": " + dtype + "[" + detail::Listed(shape) + "]"; }
};

namespace detail {

// A manifest, as fusion/model/build_folder.py writes it. Other types than expected throw ffi::Error.
class Manifest {
 public:
  explicit Manifest(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file || !fs::is_regular_file(path)) {
      throw Error(path.parent_path().string() + ": no build that `fusion tune` wrote: it has no manifest.json");
    }
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    fields_ = ffi::json::Parse(text).cast<ffi::json::Object>();
    if (!Has("format") || fields_["format"].cast<int64_t>() != kManifestFormat) {
      throw Error(path.string() + ": no manifest of format " + std::to_string(kManifestFormat));
    }
  }

  bool Has(const char* key) const { return fields_.count(ffi::String(key)) > 0; }

  std::string Text(const char* key) const { return std::string(fields_[ffi::String(key)].cast<ffi::String>()); }

  std::vector<std::string> Texts(const char* key) const {
    std::vector<std::string> found;
    for (const ffi::Any& each : fields_[ffi::String(key)].cast<ffi::json::Array>()) {
      found.emplace_back(each.cast<ffi::String>());
    }
    return found;
  }

  std::vector<std::string> Profiles() const {
    std::vector<std::string> found;
    if (!Has("profiles")) return found;
    for (const auto& [name, unused] : fields_[ffi::String("profiles")].cast<ffi::json::Object>()) {
      found.emplace_back(name.cast<ffi::String>());
    }
    return found;
  }

  int64_t Threads() const { return fields_[ffi::String("threads")].cast<int64_t>(); }

  std::vector<TensorInfo> Tensors(const char* key) const {
    std::vector<TensorInfo> found;
    for (const ffi::Any& each : fields_[ffi::String(key)].cast<ffi::json::Array>()) {
      const auto item = each.cast<ffi::json::Object>();
      TensorInfo info{std::string(item[ffi::String("name")].cast<ffi::String>()), {},
                      std::string(item[ffi::String("dtype")].cast<ffi::String>())};
      for (const ffi::Any& extent : item[ffi::String("shape")].cast<ffi::json::Array>()) {
        info.shape.push_back(extent.cast<int64_t>());
      }
      found.push_back(std::move(info));
    }
    return found;
  }

 private:
  ffi::json::Object fields_;
};

// Features of this CPU as the kernel tells them; none where it does not (a container without /proc).
inline std::set<std::string> CpuFlags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) {
      std::istringstream words(line.substr(line.find(':') + 1));
      return {std::istream_iterator<std::string>(words), {}};
    }
  }
  return {};
}

// The network for one set of input shapes, in TVM's virtual machine.
class Profile {
 public:
  explicit Profile(const fs::path& folder, const Manifest& manifest)
      : inputs(manifest.Tensors("inputs")), outputs(manifest.Tensors("outputs")) {
    CheckCpu(folder, manifest);
    const fs::path library = fs::absolute(folder / "model.so");  // a bare name would be looked for in the system's folders
    library_ = ffi::Module::LoadFromFile(library.string());
    machine_ = Function(*library_, "vm_load_executable")().cast<ffi::Module>();
    Function(*machine_, "vm_initialization")(static_cast<int>(kDLCPU), 0, kPooledAllocator);
    main_ = Function(*machine_, "main");
  }

  std::vector<Array> Run(const std::vector<Array>& arrays) {
    std::vector<ffi::AnyView> arguments;
    for (const Array& each : arrays) arguments.emplace_back(each.tensor());
    ffi::Any result;
    const std::lock_guard<std::mutex> turn(mutex_);  // a machine runs one call at a time
    (*main_).CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    std::vector<Array> found;
    if (auto several = result.try_cast<ffi::Array<ffi::Tensor>>()) {
      for (const ffi::Tensor& each : *several) found.emplace_back(each);
    } else {
      found.emplace_back(result.cast<ffi::Tensor>());
    }
    return found;
  }

  const std::vector<TensorInfo> inputs, outputs;

 private:
  static void CheckCpu(const fs::path& folder, const Manifest& manifest) {
    const std::set<std::string> present = CpuFlags();
    std::string missing;
    bool tiles = false;
    for (const std::string& flag : manifest.Texts("cpu_flags")) {
      tiles = tiles || flag == "amx_tile";
      if (!present.empty() && present.count(flag) == 0) missing += " " + flag;
    }
    if (!missing.empty()) {
      throw Error(folder.string() + ": built for " + manifest.Text("mcpu") + "; this CPU lacks" + missing +
                  ": tune the model for this CPU");
    }
    // Kernels of float32 use no tiles; what a build stores narrower may.
    const bool narrow = manifest.Has("precision") && manifest.Text("precision") != "float32";
    if (tiles && narrow && syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
      throw Error(folder.string() + ": built for a CPU with AMX, whose registers the operating system refuses here");
    }
  }

  static ffi::Function Function(const ffi::Module& module, const std::string& name) {
    auto found = module->GetFunction(name);
    if (!found.has_value()) throw Error("model.so has no function " + name + ": `fusion tune` did not write it");
    return found.value();
  }

  ffi::Optional<ffi::Module> library_, machine_;
  ffi::Optional<ffi::Function> main_;
  std::mutex mutex_;
};

}  // namespace detail

// What `fusion tune` wrote into a folder. Threads may share it: calls of one profile take turns.
class TunedModel {
 public:
  // ``threads``: of the kernels; 0: TVM_NUM_THREADS, or as many as it was tuned for, as far as there are cores. TVM
  // settles their number once in a process.
  explicit TunedModel(const std::string& folder, int threads = 0) : folder_(folder) {
    const detail::fs::path path(folder);
    try {
      const detail::Manifest manifest(path / "manifest.json");
      std::vector<detail::fs::path> folders;
      for (const std::string& name : manifest.Profiles()) {
        if (detail::fs::path(name).filename() != name) throw Error(folder + "/manifest.json: damaged, a profile is " + name);
        folders.push_back(path / name);
      }
      if (folders.empty()) folders.push_back(path);
      for (const detail::fs::path& each : folders) {
        const detail::Manifest own(each / "manifest.json");
        if (profiles_.empty()) SetThreads(threads, own.Threads());
        profiles_.push_back(std::make_unique<detail::Profile>(each, own));
      }
    } catch (const tvm::ffi::Error& error) {
      throw Error(folder + ": cannot be loaded: " + FirstLine(error.what()) + "; tune the model again");
    }
  }

  // Those of the first profile: builds for several input shapes have one for each.
  const std::vector<TensorInfo>& inputs() const { return profiles_[0]->inputs; }
  const std::vector<TensorInfo>& outputs() const { return profiles_[0]->outputs; }

  // Outputs in the order of outputs() of inputs in the order of inputs(), run by the profile of their shapes.
  std::vector<Array> run(const std::vector<Array>& arrays) const {
    for (const auto& profile : profiles_) {
      if (!Fits(arrays, profile->inputs)) continue;
      try {
        return profile->Run(arrays);
      } catch (const tvm::ffi::Error& error) {
        throw Error(folder_ + ": " + FirstLine(error.what()));
      }
    }
    std::string given, taken;
    for (const Array& each : arrays) given += " " + each.dtype() + "[" + detail::Listed(each.shape()) + "]";
    for (const auto& profile : profiles_) {
      taken += taken.empty() ? "" : "; or";
      for (const TensorInfo& each : profile->inputs) taken += " " + each.text();
    }
    throw Error(folder_ + ": the model takes" + taken + "; given:" + (given.empty() ? " nothing" : given));
  }

  // The same by name.
  std::map<std::string, Array> run_named(const std::map<std::string, Array>& arrays) const {
    std::vector<Array> ordered;
    for (const TensorInfo& each : inputs()) {
      const auto found = arrays.find(each.name);
      if (found == arrays.end()) throw Error(folder_ + ": input " + each.text() + " is missing");
      ordered.push_back(found->second);
    }
    if (arrays.size() != ordered.size()) throw Error(folder_ + ": an input is given that the model has not");
    const std::vector<Array> results = run(ordered);
    std::map<std::string, Array> named;
    for (size_t index = 0; index < results.size(); ++index) named.emplace(outputs()[index].name, results[index]);
    return named;
  }

 private:
  static bool Fits(const std::vector<Array>& arrays, const std::vector<TensorInfo>& inputs) {
    return std::equal(arrays.begin(), arrays.end(), inputs.begin(), inputs.end(),
                      [](const Array& given, const TensorInfo& wanted) {
                        return given.dtype() == wanted.dtype && given.shape() == wanted.shape;
                      });
  }

  // TVM reads the variable when it is first used.
  static void SetThreads(int threads, int64_t tuned) {
    const auto cores = static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()));
    const std::string number = std::to_string(threads > 0 ? threads : std::min(tuned, cores));
    setenv("TVM_NUM_THREADS", number.c_str(), threads > 0);
  }

  static std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

  std::string folder_;
  std::vector<std::unique_ptr<detail::Profile>> profiles_;
};

}  // namespace fusion

#endif  // FUSION_TUNED_MODEL_H_
